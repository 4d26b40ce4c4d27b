"""Interpreted kernels convert and compute in bf16, fp16 and fp8 as torch does: bit by bit, over all
that there is.
"""

import os

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here"
)

SIXTEEN = [torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2]
# Triton casts from fp8 to wider numbers only.
CASTS = [
    (source, target)
    for source in (*SIXTEEN, *FP8)
    for target in (torch.float32, torch.float64, *SIXTEEN, *FP8)
    if source != target and not (source in FP8 and target in FP8)
]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def convert(source, target, SIZE: tl.constexpr, ROUNDING: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(source + at)
    tl.store(target + at, x.to(target.dtype.element_ty, fp_downcast_rounding=ROUNDING))


@triton.jit
def compute(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x + y)
    tl.store(out + SIZE + at, x - y)
    tl.store(out + 2 * SIZE + at, x * y)
    tl.store(out + 3 * SIZE + at, tl.maximum(x, y))
    tl.store(out + 4 * SIZE + at, tl.where(x < y, x, 0.1))
    tl.store(out + 5 * SIZE + at, tl.abs(x) + tl.full((SIZE,), 0.3, x.dtype))
    tl.store(out + 6 * SIZE + at, (x == y).to(x.dtype) + at.to(x.dtype))
    tl.store(out + 7 * SIZE + at, -x)


@triton.jit
def multiply(a, b, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    x, y = tl.load(a + rows * SIZE + columns), tl.load(b + rows * SIZE + columns)
    tl.store(out + rows * SIZE + columns, tl.dot(x, y))


@triton.jit
def add_up(x, of_rows, of_columns, of_all, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    numbers = tl.load(x + at[:, None] * SIZE + at[None, :])
    tl.store(of_rows + at, tl.sum(numbers, 1))
    tl.store(of_columns + at[None, :], tl.sum(numbers, 0, keep_dims=True))
    tl.store(of_all, tl.sum(numbers))


@triton.jit
def count(total, value, SIZE: tl.constexpr):
    tl.atomic_add(total + tl.arange(0, SIZE) % 2, tl.load(value))


def converted(x: Tensor, dtype: torch.dtype, rounding: str | None = None) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    convert[(1,)](x, out, len(x), rounding)
    return out


def every(dtype: torch.dtype) -> Tensor:
    """All numbers of the dtype."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def borders(dtype: torch.dtype) -> Tensor:
    """fp32 numbers halfway between neighbours of the dtype, and those beside them; and numbers of
    random bits.
    """
    numbers = every(dtype).double()
    numbers = numbers[numbers.isfinite()].unique()
    halfway = ((numbers[1:] + numbers[:-1]) / 2).float()
    beside = [halfway.nextafter(torch.tensor(float(to))) for to in ("-inf", "inf")]
    words = torch.randint(-(2**31), 2**31, (2**16,), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    found = torch.cat((halfway, *beside, every(dtype).float(), words.view(torch.float32)))
    return torch.nn.functional.pad(found, (0, -len(found) % 4096))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal, signs of zeros too; a NaN is as good as another."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    kind = INTEGERS[expected.itemsize]
    assert torch.equal(actual.view(kind)[~nan], expected.view(kind)[~nan])


def in_blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([converted(block, dtype) for block in x.split(4096)])


def assert_converted(x: Tensor, dtype: torch.dtype) -> None:
    expected = x.to(dtype)
    if dtype == torch.float8_e4m3fn:  # a kernel that wants the largest number instead has to say so
        expected = torch.where(
            x.float().abs() > 464, torch.tensor(float("nan")), expected.float()
        ).to(dtype)
    assert_same_bits(in_blocks(x, dtype), expected)


@pytest.mark.parametrize("dtype", [*SIXTEEN, *FP8], ids=str)
def test_a_cast_of_fp32_rounds_to_the_nearest_and_ties_to_even(dtype: torch.dtype):
    assert_converted(borders(dtype), dtype)


@pytest.mark.parametrize(("source", "target"), CASTS, ids=str)
def test_a_cast_of_every_number_of_few_bits_is_that_of_torch(
    source: torch.dtype, target: torch.dtype
):
    assert_converted(every(source), target)


def test_a_cast_that_is_told_to_cuts_off():
    x = torch.tensor([1.0, 1.0039, 1.0117, -1.0117])
    assert converted(x, torch.bfloat16, "rtz").tolist() == [1.0, 1.0, 1.0078125, -1.0078125]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str
)
def test_integers_become_the_nearest_number_in_bf16(dtype: torch.dtype):
    x = (
        torch.arange(64).to(dtype)
        if dtype.itemsize == 1
        else (torch.arange(64) * 509 - 9999).to(dtype)
    )
    assert_same_bits(converted(x, torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool], ids=str)
def test_numbers_in_bf16_become_integers(dtype: torch.dtype):
    x = torch.tensor([-3.5, -0.0, 0.0, 0.25, 1.0, 2.75, 3.0, 100.0]).bfloat16()
    assert torch.equal(converted(x, dtype), x.to(dtype))


def test_arithmetic_in_bf16_rounds_each_result():
    a, b = (3 * torch.randn(2, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    b[:8] = a[:8]
    compute[(1,)](a, b, out := torch.empty(8, 64, dtype=torch.bfloat16), 64)
    constant = torch.tensor([0.1, 0.3]).bfloat16()
    expected = [
        a + b,
        a - b,
        a * b,
        torch.maximum(a, b),
        torch.where(a < b, a, constant[0]),
        a.abs() + constant[1],
        (a == b).bfloat16() + torch.arange(64).bfloat16(),
        -a,
    ]
    assert_same_bits(out, torch.stack(expected))


@pytest.mark.parametrize("dtype", [*SIXTEEN, torch.float8_e4m3fn], ids=str)
def test_a_product_of_matrices_reads_numbers_and_not_their_codes(dtype: torch.dtype):
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    multiply[(1,)](a, b, out := torch.empty(16, 16), 16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_sums_in_bf16_are_rounded_after_each_addition():
    x = torch.tensor([[256.0, 1.0], [2.0, 1.0]]).bfloat16()
    add_up[(1,)](x, rows := x.new_empty(2), columns := x.new_empty(2), total := x.new_empty(1), 2)
    assert rows.tolist() == [256.0, 3.0]  # 256 + 1 is 256
    assert columns.tolist() == [258.0, 2.0]
    assert total.tolist() == [260.0]


def test_an_atomic_addition_in_bf16_sees_those_before_it():
    count[(1,)](total := torch.zeros(2).bfloat16(), torch.tensor([1.5]).bfloat16(), 8)
    assert total.tolist() == [6.0, 6.0]
