"""Every kernel of every op against the op's reference, over the case table."""

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from kernel_cases.prepared import with_prepared
from kernel_grid import KERNELS, TRIED, grid, name_of
from memory import PoisonedMemory
from refusals import refusal_text
from torch import Tensor

from atomc import kernels, ops
from atomc.kernels.torch.sequence import refuse_paged_attention, refuse_scaled_cache
from atomc.ops.op import REGISTRY
from atomc.ops.op_traits import Kind
from atomc.platform import Platform

DEVICES = (
    ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]
)
# How far a kernel may be from the reference, in roundings of its dtype.
ROUNDINGS = {torch.float32: 32, torch.bfloat16: 4, torch.float16: 4}
# Ops whose kernels multiply fp32 by 16-bit numbers in tf32, on a GPU: how far that is off.
IN_TF32 = dict.fromkeys(
    (
        "gated_delta_rule",
        "gated_delta_rule_update",
        "conv_gated_delta_rule_update",
        "ssm_scan",
        "ssm_scan_update",
    ),
    2**-10,
)
# Ops whose kernels round weights times their scales to 16 bits, on a GPU, as most kernels for such
# checkpoints do: how far a result is off, in roundings.
ROUNDED_WEIGHTS = {"moe_experts_w4a16": 0.3}
# Ops that quantize what they compute. There the order of a sum, or another exp, may move a value
# over the border between two codes: so many of them may differ, each by one step. (A quantizer
# alone has to give the reference's codes.)
COMPUTED = {
    "rms_norm_quant",
    "add_rms_norm_quant",
    "allreduce_rms_norm_quant",
    "allreduce_add_rms_norm_quant",
    "rms_norm_pair_quant",
    "silu_and_mul_quant",
    "qk_norm_rope_kv_write",
}
MOVED = 0.01
# Of rows of experts with such a code in between. A CPU and the interpreter sum in fp32, as the
# reference does; tensor cores that sum fp8 in fewer bits move codes in most rows.
MOVED_ROWS = {"cpu": 1 / 16, "cuda": 1.0}
# Experts of quantized activations quantize between their two products, where codes may move as
# well. How far codes are apart, relative to their value (int8: to the largest value of a row).
CODE_STEP = {
    torch.float8_e4m3fn: 0.125,
    torch.float8_e4m3fnuz: 0.125,
    torch.int8: 1 / 127,
    torch.uint8: 0.5,
}


def interpreted(kernel: ops.Kernel, device: str) -> bool:
    """Whether Triton's interpreter plays a GPU for this kernel: where there is none, as conftest
    has it.
    """
    return kernel.provider == "triton" and device == "cpu" and not torch.cuda.is_available()


def platform_of(kernel: ops.Kernel, device: str) -> Platform:
    return Platform.named("h200") if interpreted(kernel, device) else Platform.detect(device)


def run(kernel: ops.Kernel, arguments: dict[str, Any]) -> Any:
    """The kernel's result, as the compiler's output would call it."""
    assert kernel.plan is None, f"{name_of(kernel)}: this test makes no plan yet"
    workspace = {}
    if kernel.workspace is not None:
        device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
        workspace["workspace"] = torch.empty(
            kernel.workspace(**arguments), dtype=torch.uint8, device=device
        )
    with PoisonedMemory():
        shared = {} if kernel.shared is None else {"shared": kernel.shared.of(arguments)}
        return kernel.function(**with_prepared(kernel, arguments) | workspace | shared)


def in_fp32(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with numbers in fp32; codes stay where the dtype of the result is said, and in
    a cache whose rows have scales between them.
    """
    coded = "out_dtype" in arguments or "index_cache" in arguments
    wide = {
        name: value.float()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not (coded and is_code(value))
        else value
        for name, value in arguments.items()
    }
    return wide | ({"out_dtype": torch.float32} if "out_dtype" in wide else {})


def step_between(op: ops.Op, arguments: dict[str, Any]) -> float:
    """The step of the codes between the two products of experts; 0 for any other op."""
    return CODE_STEP.get(arguments["x"].dtype, 0.0) if Kind.EXPERTS in op.kind else 0.0


def is_code(tensor: Tensor) -> bool:
    """Whether the elements are codes of few bits, where near is another number."""
    return tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether tensors are equal; of codes, NaN included."""
    if is_code(expected):
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(actual, expected)


def steps(codes: Tensor) -> Tensor:
    """The numbers of codes in the order of their values; uint8 holds two e2m1 codes a byte."""
    number = codes.view(torch.uint8).int()
    if codes.dtype == torch.int8:
        return codes.int()
    if codes.dtype == torch.uint8:
        number = torch.stack((number & 15, number >> 4), -1)
        return torch.where(number > 7, 8 - number, number)
    return torch.where(number > 127, 128 - number, number)


def assert_neighbours(actual: Tensor, reference: Tensor, moved: float = MOVED) -> None:
    apart = (steps(actual) - steps(reference)).abs()
    assert apart.max() <= 1, f"a code is {int(apart.max())} steps off"
    assert apart.sum() <= max(2, moved * apart.numel()), (
        f"{int(apart.sum())} of {apart.numel()} codes differ"
    )


def tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def strides(tensor: Tensor) -> list[int]:
    """The strides that matter: of dimensions with more than one element, of a tensor that has
    any.
    """
    return [
        stride
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1 and tensor.numel()
    ]


def assert_as_exact(
    actual: Tensor,
    reference: Tensor,
    truth: Tensor,
    dtype: torch.dtype,
    computed: bool = False,
    products: float = 0.0,
) -> None:
    """`actual` is near `truth`, the reference in fp32, and not much further from it than
    `reference`, which is computed in `dtype`. computed: of an op of COMPUTED; products: how far
    its products are off
    """
    assert (actual.dtype, actual.shape, actual.device) == (
        reference.dtype,
        reference.shape,
        reference.device,
    )
    if actual.numel() == 0:
        return
    if is_code(actual):
        if computed:
            assert_neighbours(actual, reference)
            return
        different = actual.view(torch.uint8) != reference.view(torch.uint8)
        assert not different.any(), f"{int(different.sum())} of {different.numel()} codes differ"
        return
    if not actual.is_floating_point():
        assert torch.equal(actual, reference), f"{actual}, expected {reference}"
        return
    rounding = max(torch.finfo(dtype).eps, torch.finfo(actual.dtype).eps)
    error, own_error = actual.float() - truth, reference.float() - truth
    size = truth.square().mean().sqrt()
    allowed = ROUNDINGS[dtype] * rounding * (truth.abs() + size)
    assert (error.abs() <= allowed).all(), (
        f"off by {error.abs().max():.3g} where values are about {size:.3g}"
    )
    if dtype != torch.float32:
        rms, own_rms = error.square().mean().sqrt(), own_error.square().mean().sqrt()
        assert rms <= 1.5 * own_rms + (0.02 * rounding + products) * size, (
            f"error {rms:.3g}, the reference has {own_rms:.3g}"
        )


def assert_but_for_codes(
    actual: Tensor, reference: Tensor, dtype: torch.dtype, step: float
) -> None:
    """`actual` is `reference` up to roundings to `dtype`, and to codes in between that moved: a
    few, by one step, in few rows.
    """
    assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape)
    if actual.numel() == 0:
        return
    rounding, error = torch.finfo(dtype).eps, actual.float() - reference.float()
    sizes = reference.float().square().mean(-1, keepdim=True).sqrt()
    bound = (ROUNDINGS[dtype] * rounding + step) * (reference.float().abs() + sizes)
    assert (error.abs() <= bound).all(), f"off by {error.abs().max():.3g}"
    rms, size = error.square().mean().sqrt(), sizes.square().mean().sqrt()
    assert rms <= (rounding + MOVED**0.5 * step) * size, f"error {rms:.3g} of {size:.3g}"
    rounded = ROUNDINGS[dtype] * rounding * (reference.float().abs() + sizes)
    moved, most = int((error.abs() > rounded).any(-1).sum()), MOVED_ROWS[actual.device.type]
    assert moved <= max(2, most * len(error)), f"codes moved in {moved} of {len(error)} rows"


def assert_same_choices(
    actual: Tensor, reference: Tensor, weights: Tensor, dtype: torch.dtype
) -> None:
    """Equal ids, in the order of falling weights; but two neighbours whose weights differ by less
    than the rounding of 16-bit logits may be exchanged, and so may the last one with one left out.
    """
    assert (actual.dtype, actual.shape) == (reference.dtype, reference.shape)
    near = weights.float().diff(dim=-1).abs() <= 2 * torch.finfo(dtype).eps * weights[..., 1:]
    last = torch.full_like(weights[..., :1], dtype != torch.float32, dtype=torch.bool)
    exchanged = torch.cat((near, last), -1) | torch.cat((near.new_zeros(last.shape), near), -1)
    assert ((actual == reference) | exchanged).all(), f"{actual}, expected {reference}"


def with_zeros_in_blind_rows(
    actual: Tensor, reference: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """The result of an attention, whose rows that see no key may be any finite numbers; the
    reference has zeros there.
    """
    assert actual.shape == reference.shape and actual.isfinite().all()
    if arguments.get("mask") is None or arguments.get("sinks") is not None:
        return actual
    return actual.masked_fill((reference == 0).all(-1, keepdim=True), 0.0)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_kernel_computes_what_its_op_means:
        cells = grid(metafunc.config.getoption("grid_seed"))
        metafunc.parametrize(
            ("kernel", "case", "dtype"),
            [
                pytest.param(*cell, id=cell.name, marks=[] if now else [pytest.mark.slow])
                for cell, now in cells
            ],
        )


def test_a_kernel_computes_what_its_op_means(
    kernel: ops.Kernel, case: str, dtype: torch.dtype, device: str
) -> None:
    def arguments() -> dict[str, Any]:
        return CASES[kernel.op][case](Draw(dtype, device, kernel.layout or "paged"))

    given, for_reference, before = arguments(), arguments(), arguments()
    reason = refusal_text(kernel, platform_of(kernel, device), given)
    if reason:
        pytest.skip(reason)
    op = ops.REGISTRY[kernel.op]
    for_truth, step = in_fp32(arguments()), step_between(op, for_reference)
    reference = tensors(op.reference(**for_reference))
    truth = reference if step else tensors(op.reference(**for_truth))
    actual = tensors(run(kernel, given))
    if kernel.op == "attention":
        actual = (with_zeros_in_blind_rows(*actual, *reference, for_reference),)

    products = 0.0
    if device == "cuda":
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        products = IN_TF32.get(op.name, 0.0) + ROUNDED_WEIGHTS.get(op.name, 0.0) * rounding
    assert len(actual) == len(reference)
    for got, low, exact in zip(actual, reference, truth, strict=True):
        if step:
            assert_but_for_codes(got, low, dtype, step)
        elif low.dtype == torch.int32 and Kind.ROUTE in op.kind:
            assert_same_choices(got, low, reference[0], dtype)
        else:
            assert_as_exact(got, low, exact, dtype, op.name in COMPUTED, products)
        assert strides(got) == strides(low)
    for name, value in before.items():
        if name in op.mutates and value is not None:
            written = for_reference[name] != value
            # Beside the garbage in the rest of a cache, any value would be near enough.
            found = (x[name][written] for x in (given, for_reference, for_truth))
            assert_as_exact(*found, dtype, op.name in COMPUTED, products)
            assert torch.equal(given[name][~written], value[~written]), (
                f"{name} was written where it should not be"
            )
        elif isinstance(value, Tensor):
            assert same_bits(given[name], value), f"{name} was written, and the op says it is not"


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_lowered_graph_can_name_the_kernel(kernel: ops.Kernel) -> None:
    function = kernel.function
    assert getattr(importlib.import_module(function.__module__), function.__name__) is function
    assert function.__name__ == kernel.op


@pytest.mark.parametrize("kernel", TRIED, ids=name_of)
def test_the_function_by_which_a_kernel_refuses_is_named_refuse(kernel: ops.Kernel) -> None:
    assert kernel.refuses is None or kernel.refuses.__name__.startswith("refuse_")


@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_kernel_takes_the_arguments_of_its_op(kernel: ops.Kernel) -> None:
    extra = [name for name in ("plan", "workspace", "shared") if getattr(kernel, name) is not None]
    parameters = {
        name: (p.kind, p.default)
        for name, p in inspect.signature(kernel.function).parameters.items()
        if name not in extra
    }
    op = ops.REGISTRY[kernel.op]
    assert parameters == {name: (p.kind, p.default) for name, p in op.signature.parameters.items()}


@pytest.mark.parametrize(
    "op", ["kv_write", "paged_attention", "rope_kv_write", "qk_norm_rope_kv_write"]
)
@pytest.mark.parametrize("platform", ["sm90", "gfx942"])
def test_every_platform_has_a_kernel_for_a_paged_cache_and_a_gpu_none_of_ours_for_a_contiguous_one(
    op: str, platform: str
) -> None:
    arguments = next(iter(CASES[op].values()))(Draw(torch.bfloat16))
    reasons = [
        (kernel.layout, refusal_text(kernel, Platform.named(platform), arguments))
        for kernel in ops.REGISTRY[op].kernels
        if kernel.provider == "torch"
    ]
    assert reasons == [("paged", None), ("contiguous", "written for the CPU")]


@pytest.mark.parametrize(
    "op", ["kv_write", "paged_attention", "rope_kv_write", "qk_norm_rope_kv_write"]
)
def test_on_a_cpu_a_paged_cache_comes_before_a_contiguous_one(op: str) -> None:
    arguments = next(iter(CASES[op].values()))(Draw(torch.float32))
    layouts = [
        kernel.layout
        for kernel in ops.REGISTRY[op].kernels
        if kernel.provider == "torch"
        and refusal_text(kernel, Platform.detect("cpu"), arguments) is None
    ]
    assert layouts[:2] == ["paged", "contiguous"]


@pytest.mark.parametrize(
    "kernel",
    [k for k in KERNELS if k.refuses in (refuse_scaled_cache, refuse_paged_attention)],
    ids=name_of,
)
def test_a_cache_with_scales_is_refused(kernel: ops.Kernel) -> None:
    arguments = next(iter(CASES[kernel.op].values()))(Draw(torch.float32, layout=kernel.layout))
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    assert (
        refusal_text(kernel, Platform.detect("cpu"), arguments | scales) == "the cache has scales"
    )


@pytest.mark.parametrize(
    "kernel", [k for k in KERNELS if k.refuses is refuse_paged_attention], ids=name_of
)
def test_a_cache_of_another_dtype_is_refused(kernel: ops.Kernel) -> None:
    arguments = CASES["paged_attention"]["decode"](Draw(torch.float32))
    arguments["q"] = arguments["q"].bfloat16()
    assert refusal_text(kernel, Platform.detect("cpu"), arguments) == (
        "the cache is torch.float32, the query torch.bfloat16: mixed dtypes are not supported"
    )


def test_an_unknown_provider_is_told_the_known_ones() -> None:
    assert (
        kernels.load("magic")
        == "provider 'magic' is not one of ours (aiter, mori, triton, cuda, zentorch, onednn, fla, torch)"
    )


@pytest.mark.parametrize("provider", (*kernels.PROVIDERS, kernels.INVARIANT))
def test_kernels_are_asked_in_the_order_of_modules(provider: str) -> None:
    if why := kernels.load(provider):
        pytest.skip(why)
    package = importlib.import_module(f"atomc.kernels.{provider}")
    number = {f"{package.__name__}.{name}": i for i, name in enumerate(package.MODULES)}
    for op in REGISTRY.values():
        names = [x.function.__module__ for x in op.kernels if x.provider == provider]
        order = [number[name] for name in names if name in number]
        assert order == sorted(order), op.name


def test_the_folder_of_tritons_cache_is_looked_at_once_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    looked: list[str] = []
    monkeypatch.setattr(kernels, "_use_trusted_folder", lambda: looked.append("triton"))
    kernels.load_module.cache_clear()
    for _ in range(3):  # as steps that sample
        kernels.load_module("atomc.kernels.triton.inverse_transform")
    assert looked == ["triton"]


def test_a_provider_without_a_folder_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROVIDERS", ("future",))
    assert kernels.load("future") == "provider 'future' is not built in this version"


def test_a_provider_whose_library_does_not_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('libvendor.so: no such file')")
    monkeypatch.setattr(kernels, "PROVIDERS", ("broken",))
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    assert (
        kernels.load("broken")
        == "provider 'broken' cannot be imported: OSError: libvendor.so: no such file"
    )
