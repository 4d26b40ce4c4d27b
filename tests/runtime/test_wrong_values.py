"""Wrong values of flags, settings and folders are refused before an engine starts, without torch."""

import json
import subprocess
import sys
from dataclasses import fields
from typing import get_args

import pytest
import torch

from atomc import LLM
from atomc.errors import OptionsError
from atomc.ops import LAYOUTS
from atomc.options import Layout, Options
from atomc.quantization import ONLINE
from atomc.runtime.config import DTYPES, SCHEMES, EngineConfig
from atomc.runtime.config_fields import choices
from atomc.runtime.server.config import ServerConfig

# Runs each command line of standard input; prints the exit code and the errors of each. An import
# of torch raises.
RUN = """
import contextlib, io, json, sys
sys.modules["torch"] = None
from atomc.cli import main
results = []
for argv in json.load(sys.stdin):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            code = main(argv)
        except SystemExit as exit:
            code = exit.code
    results.append([code, errors.getvalue()])
print(json.dumps(results))
"""
COMMANDS = {
    "serve": ["serve", "--port", "0"],
    "generate": ["generate", "-p", "a"],
    "run-batch": ["run-batch", "-i", "INPUT", "-o", "OUTPUT"],
    "latency": ["bench", "latency"],
    "throughput": ["bench", "throughput"],
    "startup": ["bench", "startup"],
}
WRONG = {
    "quantization": (["--quantization", "fp9"], "'fp9' (did you mean 'fp8'?)"),
    "dtype": (["--dtype", "fp17"], "'fp17' (did you mean 'fp16'?); choose from auto, bfloat16"),
    "not JSON": (["BROKEN"], "config.json is not JSON: Expecting"),
    "no config": (["EMPTY"], "has no config.json"),
    "no folder": (["/does/not/exist"], "/does/not/exist is neither a directory nor a name"),
}
ONLY_CONFIG = {
    "option": (["--options", "gleu=eager"], "unknown option 'gleu' (did you mean 'glue'?)"),
    "value": (["--options", "layout=padged"], "contiguous, shuffled (did you mean 'paged'?)"),
    "format": (["--load-format", "dumy"], "'dumy' (did you mean 'dummy'?)"),
}
ONLY_SERVER = {
    "tools": (["--tool-call-parser", "herms"], "'herms' (did you mean 'hermes'?)"),
    "reasoning": (["--reasoning-parser", "thing"], "'thing' (did you mean 'think'?)"),
}
CASES = {
    f"{command} {kind}": ([*argv, *wrong], message)
    for command, argv in COMMANDS.items()
    for kind, (wrong, message) in (
        WRONG
        | (ONLY_CONFIG if command != "generate" else {})
        | (ONLY_SERVER if command in ("serve", "run-batch") else {})
    ).items()
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The exit code and the errors of each case."""
    folder = tmp_path_factory.mktemp("wrong")
    names = {name: folder / name.lower() for name in ("BROKEN", "EMPTY", "INPUT", "OUTPUT")}
    for name in ("BROKEN", "EMPTY"):
        names[name].mkdir()
    (names["BROKEN"] / "config.json").write_text('{"model_type": "llama",')
    names["INPUT"].write_text("")
    lines = [[str(names.get(part, part)) for part in argv] for argv, _ in CASES.values()]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_value_is_one_line_before_torch_is_imported(results, case):
    code, errors = results[case]
    (line,) = errors.splitlines()
    assert code == 2 and CASES[case][1] in line and line.startswith("atomc: ")


@pytest.mark.parametrize(
    "config, field",
    [
        pytest.param(config, field, id=field.name)
        for config in (EngineConfig, ServerConfig)
        for field in fields(config)
        if choices(field)
    ],
)
def test_a_field_with_choices_has_no_other_value(config, field):
    with pytest.raises(ValueError, match=f"^{field.name} is 'other', expected one of "):
        config(**{field.name: "other"})
    for value in choices(field):
        config(**{field.name: value})


def test_names_that_are_listed_without_torch_are_those_of_the_tables():
    assert tuple(ONLINE) == SCHEMES
    assert tuple(LAYOUTS) == get_args(Layout)
    dtypes = dict(DTYPES)
    assert dtypes.pop("auto") is None
    for name, torch_name in dtypes.items():
        assert EngineConfig(dtype=name).dtype == torch_name
        assert isinstance(getattr(torch, torch_name), torch.dtype)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dtype": "fp17"}, ValueError, r"dtype is 'fp17' \(did you mean 'fp16'\?\), expected one"),
        ({"dtype": torch.int8}, ValueError, "dtype is 'int8', expected one of auto, bfloat16"),
        ({"quantization": "fp9"}, ValueError, r"quantization is 'fp9' \(did you mean 'fp8'\?\)"),
        ({"quantizatoin": "fp8"}, TypeError, r"no argument 'quantizatoin' \(did you mean 'quanti"),
        ({"options": {"kv_cache_dtype": "fp9"}}, OptionsError, "expected one of auto, fp8"),
        ({"options": {"passes": {"ropes": False}}}, OptionsError, r"did you mean 'rope'\?"),
        ({"options": {"providers": ["tritn"]}}, OptionsError, r"did you mean 'triton'\?"),
    ],
)
def test_a_wrong_setting_of_llm_is_refused_before_a_weight_is_read(
    settings, error, message, monkeypatch
):
    def load(*args, **kwargs):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("atomc.runtime.execution.worker.load", load)
    with pytest.raises(error, match=message):
        LLM(device="cpu", progress=False, **settings)


@pytest.mark.parametrize("dtype", ["half", "fp16", "float16", torch.float16])
def test_names_of_a_dtype_are_those_of_torch_and_others(dtype, monkeypatch):
    class LoadedError(Exception):
        pass

    def load(config, *args, **kwargs):
        raise LoadedError(config.dtype)

    monkeypatch.setattr("atomc.runtime.execution.worker.load", load)
    with pytest.raises(LoadedError, match=r"^float16$"):
        LLM(device="cpu", dtype=dtype, progress=False)


def test_the_layout_of_options_is_checked():
    assert Options(layout=None).layout is None
    with pytest.raises(OptionsError, match="expected one of paged, contiguous, shuffled"):
        Options(layout="other")
