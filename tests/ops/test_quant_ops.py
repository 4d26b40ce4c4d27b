"""What the quantizing ops and the linear layers in few bits mean: by hand, and against torch's own
formats.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from atomc import ops
from atomc.ops.formats import (
    FP8,
    MX_ROUNDINGS,
    e2m1_codes,
    e2m1_values,
    e8m0_values,
    pack_e2m1,
    pack_int4,
    unpack_e2m1,
    unpack_int4,
)
from atomc.ops.scaled_linear import mxfp4_values

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DYNAMIC = [ops.quant_fp8_per_token, ops.quant_fp8_group, ops.quant_int8_per_token]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def sqnr(exact: Tensor, other: Tensor) -> float:
    return float(
        10
        * torch.log10(
            exact.double().square().mean() / (exact.double() - other.double()).square().mean()
        )
    )


# Formats


def test_the_sixteen_codes_of_e2m1() -> None:
    assert e2m1_values(torch.arange(16, dtype=torch.uint8)).tolist() == [
        *E2M1,
        *(-value for value in E2M1),
    ]


def test_a_value_gets_the_nearest_code_of_e2m1_and_on_a_border_the_even_one() -> None:
    for low, (small, large) in enumerate(pairwise(E2M1)):
        border = torch.tensor((small + large) / 2)
        below, above = (
            torch.nextafter(border, torch.tensor(0.0)),
            torch.nextafter(border, torch.tensor(9.0)),
        )
        even = low if low % 2 == 0 else low + 1
        assert e2m1_codes(torch.stack((below, border, above))).tolist() == [low, even, low + 1]
        assert e2m1_codes(-torch.stack((below, border, above))).tolist() == [
            low + 8,
            even + 8,
            low + 9,
        ]


def test_beyond_the_largest_e2m1_a_value_is_cut_off_and_zero_keeps_its_sign() -> None:
    assert e2m1_codes(torch.tensor([7.0, 1e9, -math.inf, 0.0, -0.0, math.nan])).tolist() == [
        7,
        7,
        15,
        0,
        8,
        0,
    ]


def test_the_even_index_of_two_codes_lies_in_the_low_bits() -> None:
    codes = torch.tensor([1, 2, 3, 15], dtype=torch.uint8)
    assert pack_e2m1(codes).tolist() == [0x21, 0xF3]
    assert unpack_e2m1(pack_e2m1(codes)).equal(codes)


def test_e8m0_is_a_power_of_two_as_torch_has_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert_close(
        e8m0_values(codes), codes.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True
    )


def test_code_i_of_a_word_lies_at_bits_4i() -> None:
    codes = torch.arange(8) + 8
    assert pack_int4(codes).tolist() == [0xFEDCBA98 - 2**32]
    assert unpack_int4(pack_int4(codes)).tolist() == codes.tolist()
    many = torch.randint(16, (3, 5, 64))
    assert unpack_int4(pack_int4(many)).equal(many.int())


# Quantizing


def test_fp8_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, 448.0], [0.0, 0.5, 0.25, -0.5]])
    q, scale = ops.quant_fp8_per_token(x)
    assert scale.equal(torch.tensor([[1.0], [0.5 / 448]]))
    assert q.float().tolist() == [[0.0, 1.0, -2.0, 448.0], [0.0, 448.0, 224.0, -448.0]]
    assert ops.quant_fp8_static(x, torch.tensor([2.0])).float().tolist() == [
        [0.0, 0.5, -1.0, 224.0],
        [0.0, 0.25, 0.125, -0.25],
    ]


def test_e4m3fnuz_has_its_own_largest_number() -> None:
    x = torch.tensor([[1.0, -480.0]])
    q, scale = ops.quant_fp8_per_token(x, torch.float8_e4m3fnuz)
    assert (q.dtype, scale.item(), q.float()[0, 1].item()) == (torch.float8_e4m3fnuz, 2.0, -240.0)
    assert ops.quant_fp8_static(x, torch.ones(1), torch.float8_e4m3fnuz).float().tolist() == [
        [1.0, -240.0]
    ]


def test_int8_by_hand() -> None:
    q, scale = ops.quant_int8_per_token(torch.tensor([[127.0, -127.0, 0.5, 1.5, 2.5, -0.5]]))
    assert (q.tolist(), scale.tolist()) == ([[127, -127, 0, 2, 2, 0]], [[1.0]])


def test_each_group_has_its_own_scale_and_the_last_may_be_shorter() -> None:
    x = torch.ones(2, 130)
    x[0, 3], x[1, 129] = 448.0, -896.0
    q, scale = ops.quant_fp8_group(x)
    assert scale.tolist() == [
        [1.0, torch.tensor(1 / 448).item()],
        [torch.tensor(1 / 448).item(), 2.0],
    ]
    assert q.float()[1, 128:].tolist() == [0.5, -448.0]


def test_a_group_is_what_a_row_of_that_width_would_be() -> None:
    x = torch.randn(5, 384)
    q, scale = ops.quant_fp8_group(x)
    rows, row_scale = ops.quant_fp8_per_token(x.view(15, 128))
    assert q.float().equal(rows.float().view(5, 384))
    assert scale.equal(row_scale.view(5, 3))


@pytest.mark.parametrize("shape", [(7, 300), (2, 3, 300), (300,), (0, 300)])
def test_column_major_scales_are_the_same_numbers_in_another_order(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    (q, scale), (same, other) = (
        ops.quant_fp8_group(x),
        ops.quant_fp8_group(x, column_major_scales=True),
    )
    assert q.float().equal(same.float())
    assert scale.equal(other)
    assert other.reshape(-1, 3).t().is_contiguous()


def test_mxfp4_by_hand() -> None:
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([1.0, -0.5, 0.25, 0.1])  # amax 1 = 4 * 2^-2
    x[0, 32] = 24.0  # = 6 * 2^2
    packed, scale = ops.quant_mxfp4(x)
    assert scale.tolist() == [[127 - 2, 127 + 2]]
    assert packed[0, :2].tolist() == [6 | (8 + 4) << 4, 2 | 1 << 4]
    assert packed[0, 16].item() == 7
    assert mxfp4_values(packed, scale)[0, [0, 1, 2, 3, 32]].tolist() == [
        1.0,
        -0.5,
        0.25,
        0.125,
        24.0,
    ]


@pytest.mark.parametrize(
    ("amax", "even", "up"),
    [
        (4.0, 127, 127),
        (6.0, 127, 127),
        (6.0001, 127, 128),
        (6.5, 127, 128),
        (6.9999, 127, 128),
        (7.0, 128, 128),
        (7.9, 128, 128),
        (8.0, 128, 128),
        (2.0**-126, 0, 0),
        (2.0**-149, 0, 0),
        (0.0, 0, 0),
        (2.5e38, 252, 252),
        (3.3e38, 253, 253),
    ],
)
def test_the_two_roundings_of_the_mxfp4_scale(amax: float, even: int, up: int) -> None:
    x = torch.zeros(32)
    x[5] = -amax
    assert ops.quant_mxfp4(x, "even")[1].item() == even
    assert ops.quant_mxfp4(x, "up")[1].item() == up


def test_rounding_up_cuts_nothing_off() -> None:
    x = torch.randn(64, 256) * torch.logspace(-4, 4, 64)[:, None]
    _, scale = ops.quant_mxfp4(x, "up")
    blocks = x.view(64, 8, 32).abs().amax(-1)
    assert (blocks <= 6 * e8m0_values(scale)).all()
    assert (blocks > 3 * e8m0_values(scale)).all()


@pytest.mark.parametrize("rounding", MX_ROUNDINGS)
def test_mxfp4_keeps_what_four_bits_can(rounding: str) -> None:
    x = torch.randn(64, 256)
    assert sqnr(x, mxfp4_values(*ops.quant_mxfp4(x, rounding))) > 17.5


@pytest.mark.parametrize("quantize", DYNAMIC)
def test_zeros_stay_zeros_under_a_scale_that_is_not(quantize: ops.Op) -> None:
    q, scale = quantize(torch.zeros(3, 256, dtype=torch.bfloat16))
    assert not q.float().any()
    assert (scale > 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("quantize", [*DYNAMIC, ops.quant_mxfp4])
def test_what_is_not_finite_never_becomes_a_number(quantize: ops.Op, bad: float) -> None:
    x = torch.randn(2, 128)
    x[1, 7] = bad
    q, scale = quantize(x)
    if quantize is ops.quant_mxfp4:
        values = mxfp4_values(q, scale)
        assert values[1, :32].isnan().all() and values[1, 32:].isfinite().all()
    else:
        values = q.float() * scale
        assert not values[1, 7].isfinite()
    assert values[0].isfinite().all()


def test_a_static_scale_cuts_infinity_off_and_keeps_nan() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1e30])
    q = ops.quant_fp8_static(x, torch.ones(1)).float()
    assert q[[0, 1, 3]].tolist() == [448.0, -448.0, 448.0] and q[2].isnan()


@pytest.mark.parametrize("quantize", DYNAMIC)
def test_quantizing_keeps_most_of_a_row(quantize: ops.Op) -> None:
    x = torch.randn(64, 384) * torch.logspace(-4, 4, 64)[:, None]
    q, scale = quantize(x)
    scale = scale.repeat_interleave(384 // scale.shape[-1], -1)
    for row, back in zip(x, q.float() * scale, strict=True):
        assert sqnr(row, back) > 30


def test_wrong_attributes_are_told_the_right_ones() -> None:
    with pytest.raises(ValueError, match=r"rounding 'down' is not one of \('even', 'up'\)"):
        ops.quant_mxfp4.reference(torch.ones(32), "down")
    with pytest.raises(ValueError, match="40 columns are not a multiple of 32"):
        ops.quant_mxfp4.reference(torch.ones(2, 40))
    with pytest.raises(ValueError, match=r"fp8 dtype torch\.int8 is not one of"):
        ops.quant_fp8_static.reference(torch.ones(2), torch.ones(1), torch.int8)


# Linear layers


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )


def quantized_weight(out: int, width: int) -> Tensor:
    return torch.randn(out, width) / width**0.5


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_an_fp8_linear_is_the_product_of_what_its_codes_mean(
    dtype: torch.dtype, bias: bool
) -> None:
    q, x_scale = ops.quant_fp8_per_token(torch.randn(2, 5, 200), dtype)
    weight, weight_scale = ops.quant_fp8_per_token(quantized_weight(33, 200), dtype)
    b = torch.randn(33) if bias else None
    out = ops.scaled_linear_fp8(q, weight, x_scale, weight_scale, b, out_dtype=torch.float32)
    assert_close(
        out.double(),
        exact(q.float() * x_scale, weight.float() * weight_scale, b),
        rtol=1e-5,
        atol=1e-5,
    )
    rounded = ops.scaled_linear_fp8(q, weight, x_scale, weight_scale, b, out_dtype=torch.bfloat16)
    assert rounded.equal(out.bfloat16())


def test_an_fp8_linear_with_one_scale_each() -> None:
    x, weight = (
        torch.tensor([[1.0, 2.0]]).to(FP8[0]),
        torch.tensor([[3.0, 4.0], [-1.0, 0.5]]).to(FP8[0]),
    )
    out = ops.scaled_linear_fp8(
        x,
        weight,
        torch.tensor([0.5]),
        torch.tensor([2.0]),
        torch.tensor([1.0, 0.0]),
        out_dtype=torch.bfloat16,
    )
    assert out.tolist() == [[12.0, 0.0]]


@pytest.mark.parametrize(("out", "width"), [(256, 256), (144, 208), (48, 64)])
def test_an_fp8_linear_in_blocks(out: int, width: int) -> None:
    q, x_scale = ops.quant_fp8_group(torch.randn(5, width))
    weight = (torch.randn(out, width) * 20).to(FP8[0])
    weight_scale = torch.rand(-(-out // 128), -(-width // 128)) + 0.5
    dense = torch.empty(out, width)
    for i in range(out):
        for j in range(width):
            dense[i, j] = weight[i, j].float() * weight_scale[i // 128, j // 128]
    x = torch.cat(
        [part.float() * x_scale[:, i : i + 1] for i, part in enumerate(q.split(128, -1))], -1
    )
    result = ops.scaled_linear_fp8_block(q, weight, x_scale, weight_scale, out_dtype=torch.float32)
    assert sqnr(exact(x, dense), result) > 110


def test_the_integers_of_an_int8_linear_are_summed_exactly() -> None:
    x = torch.full((1, 8192), 127, dtype=torch.int8)
    weight = torch.full((2, 8192), 127, dtype=torch.int8)
    weight[1, 0] = 126  # too little to show in a sum of fp32 products
    total = ops.scaled_linear_int8(
        x, weight, torch.ones(1, 1), torch.ones(2, 1), out_dtype=torch.float32
    )
    assert total.tolist() == [
        [torch.tensor(float(127 * 127 * 8192 - back)).item() for back in (0, 127)]
    ]
    assert total[0, 0] != total[0, 1]


def test_an_int8_linear_by_hand() -> None:
    x, weight = (
        torch.tensor([[1, -2]], dtype=torch.int8),
        torch.tensor([[3, 4], [5, -6]], dtype=torch.int8),
    )
    out = ops.scaled_linear_int8(
        x,
        weight,
        torch.tensor([[0.5]]),
        torch.tensor([[2.0], [4.0]]),
        torch.tensor([1.0, 2.0]),
        out_dtype=torch.float32,
    )
    assert out.tolist() == [[-4.0, 36.0]]


@pytest.mark.parametrize("zeros", [None, [[3, 8]]])
def test_an_int4_linear_by_hand(zeros: list[list[int]] | None) -> None:
    codes = torch.arange(16).expand(1, 16)
    scale = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)
    out = ops.linear_w4a16(
        torch.ones(1, 16, dtype=torch.bfloat16),
        pack_int4(codes),
        scale,
        None if zeros is None else torch.tensor(zeros, dtype=torch.uint8),
        group=8,
    )
    first = sum(code - (8 if zeros is None else 3) for code in range(8))
    assert out.tolist() == [[0.5 * first + 2.0 * sum(code - 8 for code in range(8, 16))]]
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ["fp32", "mxfp4", "fp8", "fp8 per token"])
def test_an_mxfp4_linear_is_the_product_of_what_its_codes_mean(activation: str) -> None:
    x = torch.randn(5, 96)
    weight, weight_scale = ops.quant_mxfp4(quantized_weight(33, 96))
    given: Any = x
    x_scale = None
    if activation == "mxfp4":
        given, x_scale = ops.quant_mxfp4(x)
        x = mxfp4_values(given, x_scale)
    elif activation == "fp8 per token":
        given, x_scale = ops.quant_fp8_per_token(x)
        x = given.float() * x_scale
    elif activation == "fp8":
        x_scale = torch.tensor([0.01])
        given = ops.quant_fp8_static(x, x_scale)
        x = given.float() * x_scale
    out = ops.linear_mxfp4(
        given, weight, weight_scale, x_scale, torch.ones(33), out_dtype=torch.float32
    )
    assert sqnr(exact(x, mxfp4_values(weight, weight_scale), torch.ones(33)), out) > 110


# Several layers of one input


def call_of(name: str, rows: int, **changed: Any) -> dict[str, Any]:
    from kernel_cases import CASES
    from kernel_cases.draw import Draw

    op = ops.REGISTRY[name]
    arguments = dict.fromkeys(op.signature.parameters) | {"block": 128}
    make = next(iter(CASES[name].values()))
    given = make(Draw(torch.bfloat16))
    return {**arguments, **given, "weight": given["weight"][:1].expand(rows, -1), **changed}


@pytest.mark.parametrize(
    ("name", "changed", "packed"),
    [
        ("scaled_linear_fp8", {}, ("weight", "weight_scale")),
        ("scaled_linear_fp8", {"bias": torch.ones(4)}, ("weight", "weight_scale", "bias")),
        ("scaled_linear_fp8", {"weight_scale": torch.ones(1)}, ("weight",)),
        ("scaled_linear_int8", {}, ("weight", "weight_scale")),
        ("scaled_linear_fp8_block", {}, ("weight", "weight_scale")),
        ("linear_w4a16", {}, ("weight", "weight_scale")),
        ("linear_w4a16", {"zeros": torch.ones(4, 1)}, ("weight", "weight_scale", "zeros")),
        ("linear_mxfp4", {"bias": torch.ones(4)}, ("weight", "weight_scale", "bias")),
        ("linear_nvfp4", {}, ("weight", "weight_scale", "global_scale")),
    ],
)
def test_what_is_packed_to_merge(
    name: str, changed: dict[str, Any], packed: tuple[str, ...]
) -> None:
    calls = [call_of(name, 256, **changed), call_of(name, 128, **changed)]
    concat = ops.REGISTRY[name].concat
    assert concat is not None and concat(calls) == packed


def test_blocks_are_merged_at_their_borders_only() -> None:
    concat = ops.scaled_linear_fp8_block.concat
    assert concat is not None
    assert concat([call_of("scaled_linear_fp8_block", rows) for rows in (128, 64)]) == (
        "weight",
        "weight_scale",
    )
    assert concat([call_of("scaled_linear_fp8_block", rows) for rows in (64, 128)]) == (
        "64 rows end inside a block of 128 that shares one scale"
    )
