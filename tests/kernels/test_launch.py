"""Rows as one argument of a Triton kernel."""

import pytest
import torch
import triton
import triton.language as tl

from atomc.kernels.triton.launch.launch import at, inner_sizes, num_rows, rows_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _sums(x, y, out, sizes, WIDTH: tl.constexpr):
    """x, or x + y."""
    row, column = tl.program_id(0) + tl.arange(0, 1)[:, None], tl.arange(0, WIDTH)[None, :]
    value = tl.load(at(x, row, sizes) + column)
    if y is not None:
        value += tl.load(at(y, row, sizes) + column)
    tl.store(at(out, row, sizes) + column, value.to(out.ptr.dtype.element_ty))


@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("two", [False, True])
def test_a_kernel_reads_and_writes_strided_rows(dims: int, two: bool) -> None:
    x, out = torch.randn(2, 2, 5, 7, 24, device=DEVICE)
    x, out = (t.permute(2, 1, 0, 3)[..., :8][(0,) * (4 - dims)] for t in (x, out))
    y = torch.randn_like(x, memory_format=torch.contiguous_format) if two else None
    operands = [rows_of(t) for t in (x, y, out)]
    assert (operands[1] is None) == (not two)
    _sums[(num_rows(x),)](*operands, inner_sizes(x), WIDTH=8)
    assert torch.equal(out, x if y is None else x + y)
