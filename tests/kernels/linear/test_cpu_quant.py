"""Linear layers of few bits on a CPU: which kernel takes them, for how many rows, and that its
copies follow the weights.

That each computes what its op means is in tests/kernels/test_kernels.py.
"""

from typing import Any

import pytest
import torch
from kernel_cases.draw import Draw
from kernel_cases.scaled_linear import (
    int4_operands,
    int8_operands,
    mxfp4_operands,
    scaled_blocks,
    scaled_fp8,
)
from refusals import refusal_text
from torch import Tensor, nn

import atomc
from atomc import kernels, ops
from atomc.kernels import dequantized
from atomc.platform import Platform

pytestmark = pytest.mark.skipif(
    kernels.load("onednn") is not None, reason=str(kernels.load("onednn"))
)
EAGER = {"glue": "eager", "providers": ("onednn", "torch")}
CASCADELAKE, ZEN3 = Platform.named("cpu-cascadelake"), Platform.named("cpu-zen3")
HERE = Platform.detect("cpu")


def kernels_of(op: str, provider: str = "onednn") -> list[ops.Kernel]:
    return [kernel for kernel in ops.REGISTRY[op].kernels if kernel.provider == provider]


def run(kernel: ops.Kernel, given: dict[str, Any]) -> Tensor:
    prepared = {
        names[0]: prepare(*map(given.get, names)).tensors
        for names, prepare in kernel.prepares.items()
    }
    return kernel.function(**given | prepared)


class Layers(nn.Module):
    """Two layers of one input that are merged, with and without bias, and one that is not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(64, 48, dtype=dtype), nn.Linear(64, 48, dtype=dtype)
        self.down = nn.Linear(48, 80, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def quantized(scheme: str, dtype: torch.dtype) -> nn.Module:
    model = Layers(dtype).eval().requires_grad_(False)
    return atomc.quantize(model, scheme, ignore=["down"] if scheme in ("int4", "mxfp4_a16") else [])


def chosen() -> set[tuple[str, str, str]]:
    return {(c.op, c.tokens, c.chosen) for c in atomc.reports()[-1].kernels if "linear_" in c.op}


X = torch.randn(20, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "scheme", ["fp8", "fp8_per_token", "fp8_block", "int8", "int4", "mxfp4_a16"]
)
@torch.no_grad()
def test_a_quantized_model_computes_compiled_what_it_computes_eagerly_for_every_number_of_rows(
    scheme: str,
) -> None:
    model = quantized(scheme, torch.bfloat16)
    compiled = torch.compile(model, backend="atom", options=EAGER, dynamic=True)
    for rows in (2, 1, 8, 9, 20):
        x = X[:rows].bfloat16()
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_copies_of_int4_weights_follow_codes_scales_and_zero_points() -> None:
    def as_written(change: str, layer: Any) -> None:
        tensor = getattr(layer, change)
        tensor.copy_(
            15 - tensor
            if change == "zeros"
            else tensor ^ 0x11111111
            if change == "weight"
            else tensor * 3
        )

    model = quantized("int4", torch.bfloat16)
    for layer in (model.gate, model.up):
        layer.method = type(layer.method)(type(layer.method.scheme)(32, True))
        layer.set("zeros", torch.randint(0, 16, layer.weight_scale.shape, dtype=torch.uint8))
    compiled = torch.compile(model, backend="atom", options=EAGER)
    x = X[:3].bfloat16()
    for change in ("none", "weight", "weight_scale", "zeros"):
        if change != "none":
            as_written(change, model.up)
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    assert chosen() == {("linear_w4a16", "1 to 128", "onednn")}


@pytest.mark.skipif(
    not (HERE.has("avx512_vnni") or HERE.has("avx_vnni")),
    reason="without VNNI, one kernel in fp32 serves every number of rows of int8",
)
@torch.no_grad()
def test_one_row_of_int8_reads_the_weight_unpacked_and_more_read_a_copy_that_follows_it() -> None:
    model = quantized("int8", torch.bfloat16)
    compiled = torch.compile(model, backend="atom", options=EAGER, dynamic=True)
    for change in (1, -1):
        model.down.weight.mul_(change)
        for rows in (3, 1, 20):
            x = X[:rows].bfloat16()
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    many, one = (
        {(c.tokens, c.chosen) for c in report.kernels if "linear_" in c.op}
        for report in atomc.reports()[-2:]
    )
    assert (one, many & {("2 and more", "onednn")}) == (
        {("1", "onednn")},
        {("2 and more", "onednn")},
    )
    held = [
        any("prepared weights take" in note for note in report.notes)
        for report in atomc.reports()[-2:]
    ]
    assert held == [True, False]


def operands(op: str) -> dict[str, Any]:
    draw = Draw(torch.bfloat16)
    make = {
        "scaled_linear_int8": int8_operands,
        "linear_w4a16": int4_operands,
        "linear_mxfp4": mxfp4_operands,
    }[op]
    return make(draw, 3, 64, out=32)


@pytest.mark.parametrize("op", ["scaled_linear_int8", "linear_w4a16", "linear_mxfp4"])
def test_other_machines_are_refused(op: str) -> None:
    for kernel in kernels_of(op)[:2]:
        assert (
            refusal_text(kernel, Platform.named("h200"), operands(op))
            == "written for x86 CPUs, this is sm90"
        )
        arm = Platform.named("cpu-neoverse-v2")
        assert refusal_text(kernel, arm, operands(op)) == "written for x86 CPUs, this is aarch64"
        assert refusal_text(kernel, CASCADELAKE, operands(op)) is None


FEW = "linear_w4a16"
WRONG = [
    ("scaled_linear_int8", ZEN3, {}, "without VNNI, oneDNN sums int8 products inexactly or slowly"),
    ("scaled_linear_int8", CASCADELAKE, {"weight": torch.zeros(64, 32, dtype=torch.int8).t()},
     "the weight is not contiguous"),
    ("scaled_linear_int8", CASCADELAKE, {"weight_scale": torch.ones(32)},
     "the scales of the weight are torch.float32 [32], expected one in fp32 per output"),
    ("scaled_linear_int8", CASCADELAKE, {"x_scale": torch.ones(3, 1).half()},
     "the scales of x are torch.float16: written for torch.float32"),
    (FEW, CASCADELAKE, {"x": torch.zeros(3, 64)}, "x is torch.float32: PyTorch's kernel is fast in torch.bfloat16 only"),
    (FEW, CASCADELAKE, {"weight_scale": torch.ones(32, 2)},
     "weight_scale is torch.float32: PyTorch's kernel is fast in torch.bfloat16 only"),
    (FEW, CASCADELAKE, {"weight": torch.zeros(33, 8, dtype=torch.int32), "weight_scale": torch.ones(33, 2).bfloat16()},
     "33 outputs are not a multiple of 16"),
    (FEW, CASCADELAKE, {"group": 16, "weight_scale": torch.ones(32, 4).bfloat16()},
     "groups of 16: written for 32, 64, 128, 256"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "where", "given", "reason"), WRONG)
def test_what_a_kernel_would_misread_or_be_slow_at_is_refused(
    op: str, where: Platform, given, reason: str
) -> None:
    assert refusal_text(kernels_of(op)[0], where, operands(op) | given) == reason


PARTS = [
    ("scaled_linear_fp8", "torch", scaled_fp8),
    ("scaled_linear_fp8_block", "torch", scaled_blocks),
    ("linear_mxfp4", "onednn", mxfp4_operands),
    ("scaled_linear_int8", "onednn", int8_operands),
]


@pytest.mark.parametrize(("op", "provider", "make"), PARTS)
@pytest.mark.parametrize(("outputs", "columns"), [(300, 320), (257, 64), (5, 96)])
def test_a_weight_that_is_made_fp32_in_parts_has_no_seams(
    op, provider, make, outputs, columns, monkeypatch
) -> None:
    monkeypatch.setattr(dequantized, "CHUNK", 4 * columns * 20)
    given = make(Draw(torch.float32), 3, columns, out=outputs)
    kernel = kernels_of(op, provider)[-1]
    found, reference = kernel.function(**given), ops.REGISTRY[op].reference(**given)
    torch.testing.assert_close(
        found, reference, rtol=1e-5, atol=1e-5 * float(reference.abs().max())
    )


def test_eight_bit_floats_have_no_kernel_where_inductor_makes_loops_of_the_meaning() -> None:
    model = quantized("fp8", torch.bfloat16)
    with torch.no_grad():
        torch.compile(model, backend="atom", options={"providers": ("onednn", "torch")})(
            X.bfloat16()
        )
    assert {kernel for _, _, kernel in chosen()} == {"inline"}


def test_int8_has_a_kernel_on_a_cpu_without_instructions_for_it() -> None:
    given = operands("scaled_linear_int8")
    for where in (ZEN3, Platform.named("cpu-neoverse-v2")):
        packed, unpacked, in_fp32 = (
            refusal_text(kernel, where, given) for kernel in kernels_of("scaled_linear_int8")
        )
        assert packed == unpacked is not None and in_fp32 is None
    assert (
        refusal_text(kernels_of("scaled_linear_int8")[2], Platform.named("h200"), given)
        == "written for the CPU"
    )


@pytest.mark.parametrize(
    "kernel", kernels_of("scaled_linear_int8"), ids=["packed", "unpacked", "in fp32"]
)
def test_a_row_with_nan_stays_nan_and_spoils_no_other(kernel: ops.Kernel) -> None:
    x = X[:3].clone()
    x[1, 5] = float("nan")
    q, scale = ops.quant_int8_per_token(x)
    weight, weight_scale = ops.quant_int8_per_token(torch.randn(32, 64))
    given = {
        "x": q,
        "weight": weight,
        "x_scale": scale,
        "weight_scale": weight_scale,
        "out_dtype": torch.float32,
    }
    found = run(kernel, given)
    assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
