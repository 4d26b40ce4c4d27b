"""bench/transformers_tests.py: a checkout with one test of a model, which passes, fails or is
skipped.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from bench_script import loaded

pytest.importorskip("transformers")

SUITE = """
import unittest

import torch
from transformers import CompileConfig
from transformers.testing_utils import get_device_properties, require_torch_accelerator, slow


class ToyModelTest(unittest.TestCase):
    def test_generate_compile_model_forward_fullgraph(self):
        compiled = torch.compile(torch.nn.SiLU(), **CompileConfig(fullgraph=True).to_dict())
        x = torch.randn(3, 8)
        torch.testing.assert_close(compiled(x), torch.nn.functional.silu(x))

    def test_generate_compilation_all_outputs(self):
        raise ValueError("no outputs")

    def test_generate_with_static_cache(self):
        self.skipTest("it has no cache")

    @slow
    @require_torch_accelerator
    def test_sdpa_can_compile_dynamic(self):
        assert get_device_properties()[0] == "cuda"

    def test_something_else(self):
        raise ValueError("not selected")
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # What its survey sets, for the processes that it starts.
    monkeypatch.setenv("ATOMC_STRICT", os.environ.get("ATOMC_STRICT", "1"))
    return loaded("transformers_tests")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    suite = tmp_path / "tests/models/toy/test_modeling_toy.py"
    suite.parent.mkdir(parents=True)
    suite.write_text(SUITE)
    version = tmp_path / "src/transformers/__init__.py"
    version.parent.mkdir(parents=True)
    version.write_text('__version__ = "9.9"\n')
    return tmp_path


@pytest.mark.rotating
def test_the_table_has_the_outcome_of_each_test_and_the_graphs_of_atomc(
    bench: ModuleType,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = json.dumps({"glue": "eager"})
    argv = ["transformers_tests.py", str(checkout), "--only", "toy,gone", "--options", options]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "tests of transformers 9.9" in printed
    (row,) = (line for line in printed.splitlines() if line.startswith("toy    "))
    assert row.split() == [
        "toy",
        "ToyModelTest",
        "passed",
        "(1)",
        "failed",
        "skipped",
        "-",
        "passed",
    ]
    assert "toy ToyModelTest all outputs: ValueError: no outputs" in printed
    assert "toy ToyModelTest static cache: " in printed and "it has no cache" in printed
    assert "the checkout has no tests/models/gone/test_modeling_gone.py" in printed


def test_a_wrong_argument_is_one_sentence(
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more, said in (
        ([], "has no tests/models: expected a checkout of transformers"),
        (["--tests", "test_x"], "no test 'test_x': expected some of test_generate_compile_model"),
    ):
        monkeypatch.setattr(sys, "argv", ["transformers_tests.py", str(tmp_path), *more])
        with pytest.raises(SystemExit):
            bench.main()
        assert said in " ".join(capsys.readouterr().err.split())
