"""An interpreted kernel that leaves its tensors is told where it does: the tests of kernels run
under this.
"""

import os

import pytest
import torch
from memory import Memory, check_bounds
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here"
)


@triton.jit
def copy(source, target, size, read, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(source + offsets, mask=offsets < read)
    tl.store(target + offsets, x, mask=offsets < size)


@triton.jit
def count(target, at):
    tl.atomic_add(target + at, 1)


def part(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """The first elements of a longer tensor: what lies behind them is there, and not the
    kernel's.
    """
    return torch.zeros(64, dtype=dtype)[:size]


def test_a_kernel_that_stays_in_its_tensors_runs():
    source = torch.arange(7, dtype=torch.int32)
    copy[(1,)](source, target := part(7), 7, 7, BLOCK=8)
    assert torch.equal(target, source)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.uint8])
def test_a_read_behind_the_end_is_an_error(dtype: torch.dtype):
    with pytest.raises(
        Exception, match="1 of 8 elements are read outside, 0 bytes behind the end of a tensor"
    ):
        copy[(1,)](part(7, dtype), part(8, dtype), 7, 8, BLOCK=8)


def test_a_write_behind_the_end_is_an_error():
    with pytest.raises(
        Exception, match="2 of 8 elements are written outside, 0 bytes behind the end of a tensor"
    ):
        copy[(1,)](part(8), part(6), 8, 8, BLOCK=8)


@pytest.mark.parametrize("at", [-1, 4, 1000])
def test_an_atomic_outside_is_an_error(at: int):
    with pytest.raises(Exception, match="1 of 1 elements are updated outside"):
        count[(1,)](part(4), at)


def test_the_gap_between_strided_rows_is_inside_and_the_row_behind_the_last_is_not():
    memory = Memory([torch.zeros(4, 8)[:3, :2]])
    assert int(memory.ends[0] - memory.starts[0]) == (2 * 8 + 2) * 4


def test_what_is_read_behind_the_end_can_be_poison(monkeypatch: pytest.MonkeyPatch):
    from triton.runtime import interpreter

    for name in (
        "create_masked_load",
        "create_masked_store",
        "create_atomic_cas",
        "create_atomic_rmw",
    ):
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, name, getattr(interpreter.InterpreterBuilder, name)
        )
    monkeypatch.setattr(
        interpreter.GridExecutor, "_init_args_hst", interpreter.GridExecutor._init_args_hst
    )
    check_bounds(poison=True)
    source, target = part(7), torch.zeros(8, dtype=torch.int32)
    copy[(1,)](source, target, 7, 8, BLOCK=8)
    assert not target.any()  # what was read outside is not written
    copy[(1,)](source, target, 8, 8, BLOCK=8)
    assert target.tolist() == [0] * 7 + [-1]
