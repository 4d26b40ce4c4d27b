"""What AITER's compiled functions get wrong or abort on is refused, with the reason."""

from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import FP8_OF, KERNELS
from compare import compare
from kernel_cases.draw import EPS, Draw
from kernel_cases.linear import linear
from kernel_cases.scaled_linear import int8_operands, mxfp4_operands, scaled_blocks, scaled_fp8
from row_cases import by_column, halves, with_gaps

from atomc.ops.op import refusal
from atomc.platform import Platform

GFX950 = Platform.named("gfx950")
FP8 = FP8_OF["gfx950"]
DRAW = Draw(torch.bfloat16)


def reason(name: str, **given: Any) -> str | None:
    found = refusal(KERNELS[name], GFX950, given)
    return found and f"{found.code}: {found.text}"


def norm(*shape: int, residual: bool = False, **rest: Any) -> dict[str, Any]:
    given = {"x": DRAW.normal(*shape), "weight": DRAW.normal(shape[-1]), "eps": EPS, **rest}
    return given | ({"residual": DRAW.normal(*shape)} if residual else {})


ODD = "shape: rows of 77 are not a multiple of 2"


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
@pytest.mark.parametrize("style", ["after", "one_plus"])
def test_a_norm_of_an_odd_width_would_write_into_the_next_row(name: str, style: str) -> None:
    residual = name.startswith("add")
    assert reason(f"norm.{name}", **norm(5, 77, residual=residual, style=style)) == ODD
    assert reason(f"norm.{name}", **norm(5, 78, residual=residual, style=style)) is None


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_an_activation_of_an_odd_width_would_write_into_the_next_row(name: str) -> None:
    assert reason(f"activation.{name}", **halves(DRAW, 5, 77)) == ODD
    assert reason(f"activation.{name}", **halves(DRAW, 5, 78)) is None


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("activation.silu_and_mul", {}),
        ("activation.gelu_and_mul", {}),
        ("activation_quant.silu_and_mul_quant", {"scheme": "fp8_group", "dtype": FP8}),
        ("activation_quant_triton.silu_and_mul_quant", {"scheme": "fp8_group", "dtype": FP8}),
    ],
)
def test_a_gate_is_not_copied_beside_up(name: str, rest: dict[str, Any]) -> None:
    given = halves(DRAW, 5, 128, **rest)
    assert reason(name, **given) is None
    assert reason(name, **given | {"up": given["up"].clone()}) == (
        "layout: gate and up do not lie side by side in one tensor, as a merged projection leaves "
        "them"
    )


@pytest.mark.parametrize("name", ["quant_fp8_per_token", "quant_fp8_static"])
def test_codes_of_a_row_that_ends_on_no_dword_would_be_written_into_the_next_row(name: str) -> None:
    scale = {"scale": torch.ones(1)} if name == "quant_fp8_static" else {}
    said = "shape: rows of 78 are not a multiple of 4"
    assert reason(f"quant.{name}", x=DRAW.normal(5, 78), **scale) == said
    assert reason(f"quant.{name}", x=DRAW.normal(5, 80), **scale) is None


@pytest.mark.parametrize("name", ["rms_norm_quant", "add_rms_norm_quant"])
@pytest.mark.parametrize("scheme", ["fp8_group", "mxfp4"])
def test_a_norm_forms_no_groups_between_4096_and_6144_columns(name: str, scheme: str) -> None:
    def said(width: int) -> str | None:
        given = norm(3, width, residual=name.startswith("add"), scheme=scheme, rounding="up")
        return reason(f"norm_quant.{name}", **given)

    assert [said(width) for width in (4096, 6272, 8192)] == [None] * 3
    assert said(5120) == (
        "shape: rows of 5120: AITER's compiled kernel forms no groups in rows of more than 4096 "
        "columns, up to 6144"
    )
    assert said(6144) is not None


@pytest.mark.parametrize("name", ["rms_norm_quant", "add_rms_norm_quant"])
def test_aiters_triton_kernel_takes_the_groups_that_the_compiled_one_does_not_form(
    name: str,
) -> None:
    for scheme in ("fp8_group", "mxfp4"):
        given = norm(3, 5120, residual=name.startswith("add"), scheme=scheme)
        assert reason(f"norm_quant_triton.{name}", **given) is None


def test_a_norm_takes_rows_of_any_width_under_one_scale() -> None:
    for width in (4096, 5120, 6144, 8192):
        given = norm(3, width, scheme="fp8_per_token")
        assert reason("norm_quant.rms_norm_quant", **given) is None


@pytest.mark.parametrize("name", ["rms_norm_quant", "add_rms_norm_quant"])
def test_a_norm_does_not_end_in_int8_which_aiter_truncates(name: str) -> None:
    given = norm(3, 128, residual=name.startswith("add"), scheme="int8_per_token")
    assert reason(f"norm_quant.{name}", **given) == (
        "argument: AITER's compiled kernel truncates to int8, where the op rounds to nearest"
    )


def test_no_kernel_over_aiter_quantizes_to_int8() -> None:
    assert not [name for name, kernel in KERNELS.items() if kernel.op == "quant_int8_per_token"]


def test_a_product_in_16_bits_gets_rows_without_gaps() -> None:
    def said(*names: str, rows: int = 2) -> str | None:
        return reason("linear.linear", **with_gaps(linear(DRAW, rows, 64), *names))

    assert said() is None
    for name in ("x", "weight"):
        for rows in (2, 33):
            assert said(name, rows=rows) == (
                f"layout: between the rows of {name} are gaps, which AITER does not see"
            )


def test_the_stride_of_a_batch_of_one_is_not_read() -> None:
    operands = linear(DRAW, 3, 64)
    x = operands["x"].reshape(1, 3, -1)

    def said(batch: int) -> str | None:
        batches = x.as_strided((batch, 2, x.shape[-1]), (x.shape[-1], x.shape[-1], 1))
        return reason("linear.linear", **operands | {"x": batches})

    assert said(1) is None
    assert said(2) == "layout: the rows of x do not follow each other"


def test_an_int8_product_gets_a_weight_and_scales_without_gaps() -> None:
    for name in ("weight", "weight_scale"):
        given = with_gaps(int8_operands(DRAW, 5, 64, out=32), name)
        assert reason("scaled_linear.scaled_linear_int8", **given) == (
            f"layout: between the rows of {name} are gaps, which AITER does not see"
        )


def test_a_product_by_blocks_gets_scales_without_gaps() -> None:
    given = with_gaps(scaled_blocks(DRAW, 5, 256, out=256), "weight_scale")
    assert reason("scaled_linear.scaled_linear_fp8_block", **given) == (
        "layout: between the rows of weight_scale are gaps, which AITER does not see"
    )


@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"),
    [
        (64, 1536, None),
        (96, 1536, "64 x 128"),
        (64, 1600, "64 x 128"),
        (128, 512, None),
        (64, 512, "128 x 128"),
        (128, 576, "128 x 128"),
        (256, 192, None),
        (256, 256, None),
        (128, 256, "256 x 64"),
        (256, 208, "256 x 64"),
    ],
)
def test_a_shuffled_weight_fills_the_tiles_of_cks_kernels_for_any_number_of_rows(
    outputs: int, inputs: int, tile: str | None
) -> None:
    given = scaled_fp8(DRAW, 3, inputs, out=outputs, dtype=FP8)
    said = reason("scaled_linear_rows.scaled_linear_fp8", **given)
    if tile is None:
        assert said is None
    else:
        text = f"a weight of {outputs} x {inputs} does not fill CK's tiles of {tile}"
        assert said == f"shape: {text}"


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 256), (64, 192), (64, 208)])
def test_a_shuffled_weight_by_blocks_fills_the_tiles_of_cks_kernel(
    outputs: int, inputs: int
) -> None:
    given = by_column(scaled_blocks(DRAW, 3, inputs, out=outputs, dtype=FP8))
    said = reason("scaled_linear_blocks.scaled_linear_fp8_block", **given)
    assert said is not None and said.startswith("shape: ")


def test_the_scales_of_x_choose_one_of_the_products_by_blocks() -> None:
    by_row = scaled_blocks(DRAW, 33, 256, out=64, dtype=FP8)
    chosen = {
        name: [
            reason(f"{name}.scaled_linear_fp8_block", **given)
            for given in (by_row, by_column(dict(by_row)))
        ]
        for name in ("scaled_linear", "scaled_linear_blocks")
    }
    assert chosen == {
        "scaled_linear": [None, "layout: AITER's kernel reads the scales row by row"],
        "scaled_linear_blocks": ["layout: AITER's kernel reads the scales column by column", None],
    }


def test_a_shuffled_weight_has_rows_of_192_and_more() -> None:
    given = scaled_fp8(DRAW, 3, 128, out=256, dtype=FP8)
    assert reason("scaled_linear_rows.scaled_linear_fp8", **given) == (
        "shape: rows of 128: CK's kernels take 192 and more"
    )


def test_a_product_in_mxfp4_reads_256_inputs_at_a_time() -> None:
    def said(width: int) -> str | None:
        given = mxfp4_operands(DRAW, 3, width, out=32, activation="mxfp4")
        return reason("scaled_linear.linear_mxfp4", **given)

    assert said(512) is None
    assert said(384) == "shape: rows of 384 are not a multiple of 256"


def test_a_row_of_zeros_comes_back_as_zeros() -> None:
    x = Draw(torch.bfloat16).normal(3, 80)
    x[1] = 0
    with stand_ins.installed("gfx950"):
        codes, scale = KERNELS["quant.quant_fp8_per_token"].function(x)
    assert torch.equal((codes.float() * scale)[1], torch.zeros(80))
    assert (codes.float() * scale - x.float()).abs().max() < x.abs().max() / 16


UNGUARDED = {
    "linear.linear": with_gaps(linear(DRAW, 2, 64), "x"),
    "scaled_linear.scaled_linear_int8": with_gaps(int8_operands(DRAW, 5, 64, out=32), "weight"),
    "norm.rms_norm": norm(5, 77),
    "quant.quant_fp8_per_token": {"x": DRAW.normal(5, 78)},
    "activation.silu_and_mul": halves(DRAW, 5, 77),
}


@pytest.mark.parametrize("name", UNGUARDED)
def test_what_is_refused_would_give_wrong_numbers(name: str) -> None:
    with stand_ins.installed("gfx950"), pytest.raises(AssertionError, match=r"off by|steps off"):
        compare(KERNELS[name], lambda: dict(UNGUARDED[name]), torch.bfloat16)
