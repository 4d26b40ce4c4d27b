"""Linear layers in few bits beyond the table of tests/kernels/test_kernels.py: every code, exact sums,
refusals, who is chosen.
"""

import importlib
from typing import Any

import pytest
import torch
from kernel_cases.draw import Draw
from kernel_cases.scaled_linear import (
    fp8_operands,
    int4_operands,
    int8_operands,
    mxfp4_operands,
    nvfp4_operands,
    scaled_blocks,
    scaled_fp8,
)
from refusals import refusal_text
from torch import Tensor, nn

import atomc
from atomc import kernels, ops
from atomc.ops.formats import pack_e2m1, pack_int4
from atomc.platform import Platform

pytest.importorskip("triton")
assert kernels.load("triton") is None
assert kernels.load("cuda") is None
# Only where there is Triton.
w4a16, unpacking = (
    importlib.import_module(f"atomc.kernels.triton.w4a16.{name}") for name in ("w4a16", "unpacking")
)

H200 = Platform.named("h200")
DEVICE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # where it is a CPU, Triton's interpreter runs


def kernel_of(op: str, module: str) -> ops.Kernel:
    [found] = [
        kernel
        for kernel in ops.REGISTRY[op].kernels
        if kernel.function.__module__ == f"atomc.kernels.{module}"
    ]
    return found


def one_hot(columns: int) -> Tensor:
    return torch.eye(columns, device=DEVICE)


# One program for all outputs: of one row of x, on the cores, and of several, on the tensor core.
TILES = {
    "one row": {"BLOCK_N": 128, "BLOCK_W": 4, "num_warps": 4},
    "rows": {
        "BLOCK_M": 32,
        "BLOCK_N": 128,
        "BLOCK_K": 32,
        "PARTS": 1,
        "num_warps": 1,
        "num_stages": 1,
    },
}


@pytest.mark.parametrize("tile", list(TILES))
@pytest.mark.parametrize("zeros", [False, True])
def test_every_int4_code_at_every_place_of_a_word_is_read_exactly(tile: str, zeros: bool) -> None:
    codes = torch.stack([(torch.arange(32) + shift) % 16 for shift in range(16)])
    offset = torch.arange(16, dtype=torch.uint8)[:, None] if zeros else None
    out = w4a16.multiply(
        one_hot(32),
        pack_int4(codes).to(DEVICE),
        torch.full((16, 1), 0.25, device=DEVICE),
        None if offset is None else offset.to(DEVICE),
        None,
        None,
        32,
        torch.float32,
        TILES[tile],
    )
    assert torch.equal(out.cpu(), ((codes - (8 if offset is None else offset)) * 0.25).float().T)


# Rows of x and of the weight, warps, stages, programs: K is split, or not.
@pytest.mark.parametrize("tile", list(TILES))
def test_every_e2m1_code_at_every_place_of_a_word_is_read_exactly_under_every_scale(
    tile: str,
) -> None:
    codes = torch.stack([(torch.arange(32) + shift) % 16 for shift in range(16)] * 5).to(
        torch.uint8
    )
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scales = torch.tensor([1, 100, 127, 200, 250], dtype=torch.uint8).repeat_interleave(16)[:, None]
    out = w4a16.multiply(
        one_hot(32),
        unpacking.code_words(pack_e2m1(codes)).to(DEVICE),
        scales.to(DEVICE),
        None,
        None,
        None,
        32,
        torch.float32,
        TILES[tile],
    )
    values = torch.cat([magnitudes, -magnitudes])[codes.long()] * 2.0 ** (scales.int() - 127)
    assert torch.equal(out.cpu(), values.T)


def test_a_scale_that_is_not_finite_shows_in_the_outputs_it_belongs_to_and_in_no_others() -> None:
    given = mxfp4_operands(Draw(torch.float32, DEVICE), 1, 64, out=4)
    given["weight_scale"][2, 1] = 255
    out = kernel_of("linear_mxfp4", "triton.w4a16.w4a16").function(**given)
    assert out.isnan().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize(
    "module", ["triton.linear.scaled_linear", "triton.linear.scaled_linear_tiles"]
)
@pytest.mark.parametrize("rows", [1, 5])
def test_sums_of_int8_products_are_exact(module: str, rows: int) -> None:
    draw = Draw(torch.float32, DEVICE)
    given = int8_operands(draw, rows, 4224, out=24) | {
        "x_scale": torch.ones(rows, 1, device=DEVICE)
    }
    given |= {"weight_scale": torch.ones(24, 1, device=DEVICE)}
    given["x"][0], given["weight"][0] = 127, 127  # a sum beyond 2^24, where fp32 skips numbers
    exact = given["x"].double() @ given["weight"].double().T
    assert torch.equal(kernel_of("scaled_linear_int8", module).function(**given), exact.float())


def few(op: str, **changed: Any) -> dict[str, Any]:
    draw = Draw(torch.bfloat16)
    make = {
        "scaled_linear_fp8": lambda: scaled_fp8(draw, 3, 128, out=48),
        "scaled_linear_fp8_block": lambda: scaled_blocks(draw, 3, 256, out=256),
        "scaled_linear_int8": lambda: int8_operands(draw, 3, 128, out=48),
        "linear_w4a16": lambda: int4_operands(draw, 3, 128),
        "linear_mxfp4": lambda: mxfp4_operands(draw, 3, 128),
    }[op]
    return make() | changed


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("op", "module", "platform", "changed", "sentence"),
    [
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear",
            "sm80",
            {},
            "sm80 has no fp8 instructions; sm89 and later have",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear",
            "gfx942",
            {},
            "its tiles are chosen for NVIDIA GPUs",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear",
            "h200",
            {"out_dtype": torch.float32},
            "the result is torch.float32: written for torch.bfloat16 or torch.float16",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear",
            "h200",
            {"x": torch.zeros(3, 128).to(torch.float8_e5m2)},
            "x is torch.float8_e5m2, weight is torch.float8_e4m3fn: written for "
            "torch.float8_e4m3fn or torch.int8, all of one dtype",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear",
            "h200",
            {"x": torch.zeros(17, 128).to(E4M3)},
            "x has more than 16 rows, for which another kernel is faster",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear",
            "h200",
            {"weight": torch.zeros(128, 48).to(E4M3).t()},
            "the weight is not contiguous, or its size is dynamic",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear_tiles",
            "h200",
            {},
            "rows and columns of the weight are multiples of 16, where cuBLAS is faster",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear_by_row",
            "h200",
            {"x": torch.zeros(129, 128).to(E4M3)},
            "x has more than 128 rows, which are left to cuBLAS",
        ),
        (
            "scaled_linear_fp8",
            "triton.linear.scaled_linear_by_row",
            "h200",
            {"x_scale": torch.ones(1), "weight_scale": torch.ones(1)},
            "one scale for all rows, which cuBLAS takes as fast",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "sm80",
            {},
            "fp8 products of cuBLAS run on NVIDIA GPUs from sm89 on",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "gfx942",
            {},
            "fp8 products of cuBLAS run on NVIDIA GPUs from sm89 on",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "h200",
            {"weight": torch.zeros(40, 128).to(E4M3)},
            "a weight of 40 x 128: cuBLAS takes multiples of 16",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "h200",
            {"x": torch.zeros(3, 128).to(torch.float8_e4m3fnuz)},
            "x is torch.float8_e4m3fnuz, weight is torch.float8_e4m3fn: written for "
            "torch.float8_e4m3fn, all of one dtype",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "h200",
            {"bias": torch.zeros(48)},
            "bias is torch.float32: written for torch.bfloat16",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "h200",
            {"out_dtype": torch.float32},
            "the result is torch.float32: written for torch.bfloat16 or torch.float16",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "sm100",
            {"out_dtype": torch.float16},
            "the result is torch.float16: with a scale per row, sm100 supports only bfloat16",
        ),
        (
            "scaled_linear_fp8",
            "cuda.scaled_linear",
            "h200",
            {"weight": torch.zeros(128, 48).to(E4M3).t()},
            "the weight is not contiguous",
        ),
        (
            "scaled_linear_fp8_block",
            "triton.linear.scaled_linear_tiles",
            "h200",
            {"block": 64},
            "blocks of 64: written for 128",
        ),
        (
            "linear_w4a16",
            "triton.w4a16.w4a16",
            "h200",
            {"group": 16},
            "groups of 16: written for 32, 64 and 128",
        ),
        (
            "linear_w4a16",
            "triton.w4a16.dequantized",
            "h200",
            {"x": torch.zeros(3, 128)},
            "x is torch.float32: written for torch.bfloat16 or torch.float16",
        ),
        (
            "linear_mxfp4",
            "triton.w4a16.w4a16",
            "h200",
            {"x": torch.zeros(3, 128).half()},
            "x is torch.float16: written for torch.float32 or torch.bfloat16 or "
            "torch.float8_e4m3fn or torch.uint8",
        ),
        (
            "linear_mxfp4",
            "triton.w4a16.w4a16",
            "sm80",
            {"x": torch.zeros(3, 128).to(E4M3), "x_scale": torch.ones(1)},
            "sm80 has no fp8 instructions; sm89 and later have",
        ),
        (
            "linear_mxfp4",
            "triton.w4a16.dequantized",
            "h200",
            {"x": torch.zeros(3, 128).to(E4M3), "x_scale": torch.ones(1)},
            "x is torch.float8_e4m3fn: written for torch.bfloat16 or torch.uint8",
        ),
    ],
)
def test_a_refusal_says_why(
    op: str, module: str, platform: str, changed: dict[str, Any], sentence: str
) -> None:
    assert (
        refusal_text(kernel_of(op, module), Platform.named(platform), few(op, **changed))
        == sentence
    )


FEW_AND_MANY = [("1 to 16", "triton"), ("17 and more", "triton")]
SCALED_BY_ROW = [("1 to 16", "triton"), ("17 to 128", "triton"), ("129 and more", "cuda")]


@pytest.mark.parametrize(
    ("scheme", "op", "expected"),
    [
        ("fp8", "scaled_linear_fp8", SCALED_BY_ROW),
        ("fp8_per_token", "scaled_linear_fp8", SCALED_BY_ROW),
        ("fp8_block", "scaled_linear_fp8_block", FEW_AND_MANY),
        ("int8", "scaled_linear_int8", FEW_AND_MANY),
        ("int4", "linear_w4a16", [("any", "triton")]),
        ("mxfp4_a16", "linear_mxfp4", [("any", "triton")]),
        ("mxfp4", "linear_mxfp4", [("1 to 64", "triton"), ("65 and more", "triton")]),
        ("nvfp4_a16", "linear_nvfp4", [("1 to 64", "triton"), ("65 and more", "triton")]),
    ],
)
def test_a_number_of_rows_decides_which_kernel_multiplies(
    scheme: str, op: str, expected: list[tuple[str, str]]
) -> None:
    layer = nn.Sequential(nn.Linear(128, 256, bias=False)).bfloat16().requires_grad_(False)
    x = torch.randn(300, 128, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(x, 0)
    report = atomc.explain(atomc.quantize(layer, scheme), x, platform="h200")
    assert [
        (choice.tokens, choice.chosen) for choice in report.kernels if choice.op == op
    ] == expected


@pytest.mark.parametrize(
    ("op", "in_strips"),
    [
        ("linear_w4a16", [("w4a16_mma", True)]),
        ("linear_mxfp4", [("w4a16_mma", True)]),
        ("linear_nvfp4", []),
    ],
)
def test_many_rows_find_the_kernel_that_unpacks_once_before_the_one_that_takes_any_number(
    op: str, in_strips: list[tuple[str, bool]]
) -> None:
    """And those that read a weight in strips first."""
    triton = [kernel for kernel in ops.REGISTRY[op].kernels if kernel.provider == "triton"]
    assert [
        (kernel.function.__module__.rpartition(".")[2], 64 in kernel.tokens) for kernel in triton
    ] == [*in_strips, ("dequantized", False), ("w4a16", True)]


def error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact.double()).norm() / exact.double().norm())


LARGE = {
    "scaled_linear_fp8": [
        lambda draw, rows: scaled_fp8(draw, rows, 4096, out=6144, per="tensor"),
        lambda draw, rows: scaled_fp8(draw, rows, 12288, out=4096, bias=True),
        lambda draw, rows: scaled_fp8(draw, rows, 4096, out=4096, per="token"),
    ],
    "scaled_linear_fp8_block": [
        lambda draw, rows: scaled_blocks(draw, rows, 4096, out=6144),
        lambda draw, rows: scaled_blocks(draw, rows, 12288, out=4096, bias=True),
    ],
    "scaled_linear_int8": [lambda draw, rows: int8_operands(draw, rows, 4096, out=6144)],
    "linear_w4a16": [
        lambda draw, rows: int4_operands(draw, rows, 4096, out=4096),
        lambda draw, rows: int4_operands(draw, rows, 12288, out=4096, group=128, zeros=True),
    ],
    "linear_nvfp4": [lambda draw, rows: nvfp4_operands(draw, rows, 4096, out=4096)],
    "linear_mxfp4": [
        lambda draw, rows: mxfp4_operands(draw, rows, 4096, out=4096),
        lambda draw, rows: mxfp4_operands(draw, rows, 4096, out=4096, activation="mxfp4"),
        lambda draw, rows: mxfp4_operands(draw, rows, 4096, out=4096, activation="fp8 per token"),
    ],
}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 16, 17, 64, 65, 200, 300])
@pytest.mark.parametrize("op", list(LARGE))
def test_layers_of_a_real_size_are_as_exact_as_bf16_lets_them_be(op: str, rows: int) -> None:
    for make in LARGE[op]:
        given = make(Draw(torch.bfloat16, "cuda"), rows)
        exact = ops.REGISTRY[op].reference(
            **given
            | ({"out_dtype": torch.float32} if "out_dtype" in given else {"x": given["x"].float()})
        )
        for kernel in ops.REGISTRY[op].kernels:
            if kernel.provider in ("triton", "cuda") and not refusal_text(
                kernel, Platform.detect("cuda"), given
            ):
                # Rounding to bf16 alone is 1.7e-3; a weight of int4 that is rounded, too, 2.4e-3;
                # pairs of int4 in bf16, and many rows of fp8 that cuBLAS sums, 3.1e-3.
                pairs = op == "linear_w4a16" and rows == 1
                coarse = pairs or (kernel.provider == "cuda" and rows == 300)
                out = kernel.function(**given | kernel.prepared(given))
                assert error(out, exact) < (3.5e-3 if coarse else 2.6e-3), (
                    kernel.function.__module__
                )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_layers_read_what_the_quantizer_before_them_wrote_in_a_graph_that_is_replayed(
    rows: int,
) -> None:
    draw = Draw(torch.bfloat16, "cuda")
    layer = fp8_operands(draw, rows, 4096, out=4096)
    scale = torch.full((1,), 2e-4, device="cuda")
    x = draw.normal(rows, 4096)
    quant = kernel_of("quant_fp8_per_token", "triton.rows.quant").function
    kernel = next(
        kernel
        for provider in ("triton", "cuda")
        for kernel in ops.scaled_linear_fp8.kernels
        if kernel.provider == provider
        and rows in kernel.tokens
        and not refusal_text(kernel, H200, few("scaled_linear_fp8"))
    )

    def step(after: Any = lambda: None) -> Tensor:
        now = x
        for _ in range(6):
            codes, of_row = quant(now)
            after()
            now = kernel.function(codes, layer["weight"], of_row, scale, out_dtype=torch.bfloat16)
            after()
        return now

    step(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert torch.equal(out, step(torch.cuda.synchronize))


@pytest.mark.parametrize("scheme", ["fp8_per_token", "int8_per_token"])
@pytest.mark.parametrize("rows", [2, 70])
def test_wide_gated_rows_are_quantized_alike_in_one_launch_and_in_two(
    scheme: str, rows: int
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gate, up = torch.randn(2, rows, 8200, generator=torch.Generator().manual_seed(0)).to(
        device, torch.float16
    )
    (kernel,) = (
        kernel.function for kernel in ops.silu_and_mul_quant.kernels if kernel.provider == "triton"
    )
    codes, scales = kernel(gate, up, scheme=scheme)
    expected, expected_scales = ops.silu_and_mul_quant.reference(gate, up, scheme=scheme)
    torch.testing.assert_close(scales, expected_scales)
    assert (codes.float() != expected.float()).float().mean() < 1e-3
