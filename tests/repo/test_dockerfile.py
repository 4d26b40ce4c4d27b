"""What of the Dockerfile can be checked without building it."""

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from atomc.cli import _parser
from atomc.runtime.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
INSTRUCTIONS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line]


def arguments(name):
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def copied():
    """The sources that come from the context of the build."""
    for rest in arguments("COPY"):
        *sources, _ = shlex.split(rest)
        if not sources[0].startswith("--"):
            yield from sources


def test_instructions_are_known_and_arguments_are_declared():
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK"}
    assert {name for name, _ in INSTRUCTIONS} == known | {"ENTRYPOINT", "CMD"}
    declared = {each.partition("=")[0] for each in arguments("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", TEXT)) == declared


def test_stages_are_copied_from_and_the_last_one_is_run():
    named = [each.partition(" AS ")[2] for each in arguments("FROM")]
    assert re.findall(r"--from=(\w+)", TEXT) == named[:-1] and named[-1] == ""


def test_what_is_copied_exists_and_is_in_the_context():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not any(fnmatch(source, pattern) for pattern in ignored), source


def test_the_wheel_gets_all_that_it_is_built_of():
    links = {path.readlink().name for path in (ROOT / "atomc").iterdir() if path.is_symlink()}
    needed = {"atomc", "pyproject.toml", PROJECT["project"]["readme"], "LICENSE", *links}
    assert links and needed <= set(copied())


def test_python_and_extras_are_those_of_the_project():
    (version,) = re.findall(r"PYTHON=3\.(\d+)", TEXT)
    (least,) = re.findall(r">=3\.(\d+)", PROJECT["project"]["requires-python"])
    assert int(version) >= int(least)
    (install,) = [each for each in arguments("RUN") if "pip install" in each]
    extras = re.findall(r"\)\[(\w+)\]", install)
    assert extras and set(extras) <= PROJECT["project"]["optional-dependencies"].keys()
    assert "--constraint /constraints.txt" in install and "constraints.txt" in set(copied())


def test_the_container_runs_a_command_of_atomc_on_its_port():
    ((entry,),) = map(json.loads, arguments("ENTRYPOINT"))
    (command,) = map(json.loads, arguments("CMD"))
    assert entry in PROJECT["project"]["scripts"]
    given = _parser().parse_args(command)
    assert given.host == "0.0.0.0"
    default = ServerConfig().port
    assert arguments("EXPOSE") == [str(default)]
    assert f"127.0.0.1:{default}/health" in arguments("HEALTHCHECK")[0]
