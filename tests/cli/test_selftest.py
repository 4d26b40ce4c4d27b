"""`atomc doctor` and its self-test: what runs here is tried, a wrong kernel is found, the last
start is explained.
"""

import json
from dataclasses import asdict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from atomc import kernels, ops
from atomc.cache.store import StartRecord, last_start, record_start
from atomc.cli import doctor, main
from atomc.ops.op import REGISTRY
from atomc.ops.op_traits import Kind
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.records import CacheOutcome
from atomc.report.report import Report
from atomc.testing.examples import EXAMPLES
from atomc.testing.random_inputs import RandomInputs
from atomc.testing.selftest import self_test, text

CPU = Platform.detect("cpu")


@pytest.fixture
def only(monkeypatch):
    """The self-test of these ops alone, each with its first kernel for the CPU."""
    for provider in (*kernels.PROVIDERS, kernels.INVARIANT):
        kernels.load(provider)

    def found(*names, provider="torch"):
        for name, op in REGISTRY.items():
            own = (
                [kernel for kernel in op.kernels if kernel.provider == provider][:1]
                if name in names
                else []
            )
            monkeypatch.setitem(vars(op), "kernels", own)
        return lambda: list(self_test(CPU))

    return found


def test_every_op_has_an_example():
    assert {op for op in REGISTRY.values() if Kind.COLLECTIVE not in op.kind} == set(EXAMPLES)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_the_shape_of_an_op_is_known_for_a_number_of_tokens_that_is_not(op):
    """As a served model is traced."""
    rows = 13  # no other dimension has this size
    for make in EXAMPLES[op].values():
        given = make(RandomInputs(torch.bfloat16, "cpu", rows))
        with FakeTensorMode(shape_env=(env := ShapeEnv())):
            tokens = env.create_unbacked_symint()
            torch._check(tokens >= 0)
            for name, value in given.items():
                if isinstance(value, torch.Tensor):
                    shape = [tokens if size == rows else size for size in value.shape]
                    given[name] = torch.empty(shape, dtype=value.dtype)
            getattr(torch.ops.atom, op.name)(**given)


@pytest.mark.parametrize("op", EXAMPLES, ids=lambda op: op.name)
def test_examples_are_arguments_of_their_op_and_the_same_each_time(op):
    for make in EXAMPLES[op].values():
        for rows in (1, 33):
            first, second = (make(RandomInputs(torch.bfloat16, "cpu", rows)) for _ in range(2))
            op.signature.bind(**first)
            tensors = [name for name, x in first.items() if isinstance(x, torch.Tensor)]
            assert tensors and all(
                first[name].view(torch.uint8).equal(second[name].view(torch.uint8))
                for name in tensors
            )


def test_kernels_of_this_machine_pass(only):
    found = only("rms_norm", "paged_attention", "scaled_linear_fp8_block", "kv_write")()
    assert [one.passed for one in found] == [True] * 4
    assert all(one.tried >= 4 for one in found)


def test_a_wrong_kernel_is_found_and_the_exit_code_says_so(only, capsys, monkeypatch):
    run = only("rms_norm")

    @ops.rms_norm.kernel("torch")
    def rms_norm(x, weight, eps, style="after"):
        return ops.rms_norm.reference(x, weight, eps, style) * 1.01

    good, bad = run()
    assert good.passed and not bad.passed
    assert "float32" in bad.said and "64 are allowed" in bad.said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--self-test"]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and out.rstrip().endswith("1 kernels passed, 1 failed, 0 were not tried")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError("no such device\nand more"), "RuntimeError: no such device"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_a_kernel_that_raises_has_failed(only, error, text):
    run = only("silu_and_mul")

    @ops.silu_and_mul.kernel("torch")
    def silu_and_mul(gate, up):
        raise error

    bad = run()[-1]
    assert bad.passed is False and bad.said.endswith(text)


def test_a_kernel_that_forgets_to_write_is_found(only):
    run = only("kv_write")

    @ops.kv_write.kernel("torch", layout="paged")
    def kv_write(k, v, k_cache, v_cache, slots, k_scale=None, v_scale=None):
        return k.new_empty((0,))

    assert [one.passed for one in run()] == [True, False]


def test_a_kernel_of_another_machine_is_not_tried_and_says_why(only):
    triton = only(*REGISTRY, provider="triton")()
    assert triton and all(one.passed is None for one in triton)
    of_one = [one.said for one in triton if Kind.COLLECTIVE not in REGISTRY[one.op].kind]
    assert of_one and all("GPU" in said for said in of_one)
    assert "not tried" in text(triton)


def test_doctor_names_the_versions_that_kernels_go_by(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    versions = {
        line.split()[0]: line.split()[1]
        for line in out.splitlines()
        if line.startswith(("torch ", "onednn "))
    }
    assert versions["torch"] == torch.__version__ and versions["onednn"][0].isdigit()
    assert "last start" in out


def test_doctor_says_what_the_cache_did_in_the_last_start(tmp_path):
    options = Options(cache_dir=str(tmp_path))
    assert doctor._last_start(last_start(options)) == [("last start", "not known")]
    for outcome in (
        CacheOutcome("hit"),
        CacheOutcome("miss", "no entry for this graph"),
        CacheOutcome("hit"),
    ):
        record_start(options, Report("Qwen3", cached=outcome))
    rows = doctor._last_start(last_start(options))
    assert rows[0][1].endswith("Qwen3: hit (2 graphs)") and rows[1] == (
        "",
        "Qwen3: miss: no entry for this graph",
    )


def test_only_the_graphs_of_the_last_process_count(tmp_path):
    options = Options(cache_dir=str(tmp_path))
    lines = [
        StartRecord(1.0, 10, "A", "hit"),
        StartRecord(2.0, 11, "B", "miss: the cache is empty"),
    ]
    (tmp_path / "starts.jsonl").write_text(
        "\n".join([*(json.dumps(asdict(line)) for line in lines), "torn {"])
    )
    assert last_start(options) == lines[1:]


def test_a_cache_that_is_not_there_is_not_made_to_remember(tmp_path):
    options = Options(cache_dir=str(tmp_path / "none"))
    record_start(options, Report("A", cached=CacheOutcome("hit")))
    assert not (tmp_path / "none").exists() and last_start(options) == []
