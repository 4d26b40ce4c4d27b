"""Our kernels over AITER's real code, from a checkout: interpreted, compiled for its GPUs, run, and
on fake tensors.

    ATOMC_AITER_SOURCE=~/aiter pytest tests/kernels/aiter/test_aiter_proofs.py

ATOMC_AITER_SOURCE is a checkout, or a folder into which pip put the wheel amd-aiter.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from aiter_cases import (
    ARCHS,
    COMPILED,
    IN_TRITON,
    PARTLY_COMPILED,
    Stage,
    is_todays,
    source,
    staged,
)

pytestmark = pytest.mark.skipif(
    not source(), reason="ATOMC_AITER_SOURCE names no checkout of AITER"
)
pytest.importorskip("triton")


# A worker for each architecture: the processes that its fixtures start are slow to begin.
@pytest.fixture(
    scope="module",
    params=[pytest.param(arch, marks=pytest.mark.xdist_group(f"AITER {arch}")) for arch in ARCHS],
)
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def interpreter(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from staged("interpret", arch, tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from staged(
        "cuda", "gfx950", tmp_path_factory.mktemp("stage")
    )  # whose fp8 NVIDIA's GPUs have, too


@pytest.fixture(scope="module")
def compiler(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from staged("compile", arch, tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def faker(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    yield from staged("fake", arch, tmp_path_factory.mktemp("stage"))


def check(name: str, outcomes: dict[str, str]) -> None:
    failed = {case: outcome for case, outcome in outcomes.items() if outcome.startswith("failed")}
    assert not failed, "\n".join(f"{case}: {outcome}" for case, outcome in failed.items())
    if not any(outcome.startswith("passed") for outcome in outcomes.values()):
        pytest.skip(f"{name} refuses all: {sorted(set(outcomes.values()))}")


def test_todays_aiter_has_every_function_that_we_call(faker: Stage) -> None:
    if not is_todays():
        pytest.skip("this AITER is older than its present folders, and may lack functions")
    assert faker.tell(lacking="") == {}


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", IN_TRITON)
def test_in_the_interpreter_a_kernel_computes_what_its_op_means(
    name: str, dtype: str, interpreter: Stage, arch: str
) -> None:
    # Architectures differ in their fp8 alone, and dtypes in rounding: a few cases of the others
    # show that.
    most = 1000 if (arch, dtype) == ("gfx950", "bfloat16") else 4
    check(name, interpreter.tell(kernel=name, dtype=dtype, most=most))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", IN_TRITON)
def test_on_a_gpu_of_nvidias_a_kernel_computes_what_its_op_means(
    name: str, dtype: str, runner: Stage
) -> None:
    check(name, runner.tell(kernel=name, dtype=dtype))


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize("name", IN_TRITON)
def test_a_kernel_compiles_to_an_object(name: str, compiler: Stage) -> None:
    outcomes = compiler.tell(kernel=name, dtype="bfloat16", most=2)
    check(name, outcomes)
    assert any(len(outcome.split()) > 1 for outcome in outcomes.values()), "nothing was compiled"


@pytest.mark.parametrize("name", sorted(set(COMPILED) - PARTLY_COMPILED))
def test_on_fake_tensors_a_kernel_gives_the_shapes_of_its_op(name: str, faker: Stage) -> None:
    outcomes = faker.tell(kernel=name, dtype="bfloat16")
    check(name, outcomes)
    assert any(len(outcome.split()) > 1 for outcome in outcomes.values()), "AITER was not called"


# Scheme -> ops of the model, and of the runtime, that AITER serves in Triton; decibels that its
# other roundings leave.
SERVED = {
    "": ({"rms_norm", "add_rms_norm", "rope", "paged_attention"}, 45),
    "fp8_block": (
        {"add_rms_norm_quant", "silu_and_mul_quant", "quant_fp8_group", "scaled_linear_fp8_block"},
        30,
    ),
    "mxfp4": ({"add_rms_norm_quant", "silu_and_mul_quant", "quant_mxfp4", "linear_mxfp4"}, 20),
}


def check_model(scheme: str, found: dict[str, Any]) -> None:
    ops, decibels = SERVED[scheme]
    assert {op for op in ops if "aiter" in found["kernels"].get(op, ())} >= ops - set(
        found["lacking"]
    ), found["kernels"]
    assert found["sqnr"] > decibels
    assert found["tokens"][0] == found["tokens"][1]


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize("scheme", SERVED)
def test_a_model_is_recognised_fused_lowered_and_run(
    scheme: str, interpreter: Stage, arch: str
) -> None:
    if arch == "gfx942" and scheme:
        pytest.skip("a model is quantized for gfx942 on a machine that has it: its fp8 is another")
    check_model(scheme, interpreter.tell(model=scheme))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SERVED)
def test_a_model_is_recognised_fused_lowered_and_run_on_a_gpu_of_nvidias(
    scheme: str, runner: Stage
) -> None:
    check_model(scheme, runner.tell(model=scheme))
