"""What README, CONTRIBUTING and docs/ print is true: Python blocks run, commands parse, files and rewrites exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from atomc import kernels, passes
from atomc.cli import _parser
from atomc.op import REGISTRY
from atomc.options import Options

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run_one_after_another_and_print_what_they_say(page, tmp_path, capsys, monkeypatch):
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
        pytest.importorskip("tokenizers")
    for provider in kernels.PROVIDERS:
        kernels.load(provider)
    for op in REGISTRY.values():  # a page may register more, which must not stay
        monkeypatch.setattr(op, "kernels", list(op.kernels))
    code = "\n".join(blocks(page, "python"))
    name = f"page_{page.stem.lower()}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    printed = capsys.readouterr().out
    for promised in re.findall(r"^print\(.*  # (.*?)(?: \.\.\.|\.\.\.\)|$)", code, re.MULTILINE):
        assert promised.rstrip(" ;,") in printed, printed


COMMANDS = [
    pytest.param(command, id=command.strip())
    for page in PAGES
    for command in re.findall(r"(?:^|`)(atomc (?:generate|explain|audit|diff|serve|bench|doctor)[^`#\n]*)",
                              page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    _parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    text = page.read_text()
    named = re.findall(r"`((?:atomc|passes|models|runtime|tests|bench)/[\w/]+(?:\.py|/))`", text)
    linked = [(page.parent / link).relative_to(ROOT) for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert [str(path) for path in (*named, *linked) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_ascii(page):
    assert page.read_text().isascii()


def test_every_rewrite_has_its_place():
    text = (ROOT / "docs/rewrites.md").read_text()
    titles = {name for line in re.findall("^### (.*)$", text, re.MULTILINE) for name in line.split(", ")}
    names = {p.name for p in passes.PIPELINE}
    assert {p.name for p in passes.PIPELINE if p.rewrites} <= titles <= names


def test_every_option_is_in_the_table():
    text = (ROOT / "README.md").read_text()
    options = set(re.findall(r"^\| `(\w+)` \| ", text, re.MULTILINE))
    assert options == set(Options.__dataclass_fields__) - {"mode"}
