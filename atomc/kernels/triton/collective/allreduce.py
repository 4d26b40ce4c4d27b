"""A sum over the GPUs of a host for few tokens, with the add and the norm that follow, in one
kernel: each rank writes its rows into the memory of every other rank, waits for theirs, and sums in
the order of the ranks, so that all ranks compute the same bits.

A number is its own flag. A buffer is EMPTY, the bits of -0.0, where nothing was received; a sender
replaces these bits by zero, which no sum can tell apart. So a number that is not EMPTY has arrived,
in whichever order the link delivers: there are no flags, and no fence between data and flag. The
receiver writes EMPTY again after it has read.

Buffers have two halves, which the exchanges of a row use in turn. A rank starts exchange n + 1 of a
row after it has ended n, for which it received the row of each peer; a peer sends it after it has
ended n - 1, and has read and emptied that half. So when n + 1 writes the half of n - 1, it is
empty. This holds for each row by itself: rows that an exchange leaves out keep their half, on all
ranks, because all ranks make the same calls. It needs that kernels of one rank that use the same
memory do not overlap: they run on one stream, and with programmatic dependent launch each waits for
the last one before it reads or writes. Which half is next is in memory of the device, so that a
CUDA graph can be replayed, and graphs of several sizes in any order.

A program sends its row before it waits for those of the peers. Programs start in the order of their
rows: the first row that is not complete on all GPUs has started on all, because only rows before it
can be in its way, and these are complete. So it is sent, and completes. A peer that is dead never
sends: the wait ends when `aborted` is set (torch_compat.peer_memory.abort), or with the process.

T tokens, D width, N ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.launch.launch import begin, overlap
from atomc.kernels.triton.rows.norm import normed_dtype, weighted
from atomc.torch_compat.peer_memory import EMPTY, ROW_BYTES, PeerMemory

_EMPTY_16 = constexpr(EMPTY)
_EMPTY_32 = constexpr(EMPTY * 2**16 + 2**15)  # two of them


@triton.jit
def _exchange(
    x_ptr,
    buffers,
    halves_ptr,
    aborted_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    D: constexpr,
    BLOCK: constexpr,
    ROWS: constexpr,
    STRIDE: constexpr,
    RANK: constexpr,
    N: constexpr,
    STYLE: constexpr,
    PUSH: constexpr,
    REDUCE: constexpr,
    PDL: constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = row * D + column
    dtype: constexpr = x_ptr.dtype.element_ty
    EMPTY: constexpr = _EMPTY_32 if dtype.primitive_bitwidth == 32 else _EMPTY_16
    begin(PDL)
    half = tl.load(halves_ptr + row)
    bits = tl.load(x_ptr + at, inside, 0.0).to(buffers[0].dtype.element_ty, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits)
    slot = (half * N * ROWS + row) * STRIDE
    if PUSH:
        for peer in tl.static_range(N):
            if peer != RANK:
                tl.store(buffers[peer] + slot + RANK * ROWS * STRIDE + column, bits, inside)
        tl.debug_barrier()  # the compiler keeps these stores before the loop that waits
    if REDUCE:
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
        inbox = buffers[RANK]
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(N):
            if source == RANK:
                total += bits.to(dtype, bitcast=True).to(tl.float32)
            else:
                place = inbox + slot + source * ROWS * STRIDE + column
                received = tl.load(place, inside, 0, volatile=True)
                waiting = tl.max((received == EMPTY).to(tl.int32), 0)
                while waiting > 0:
                    received = tl.load(place, inside, 0, volatile=True)
                    aborted = tl.load(aborted_ptr, volatile=True)
                    waiting = tl.max((received == EMPTY).to(tl.int32), 0)
                    waiting = tl.where(aborted != 0, 0, waiting)
                tl.store(place, tl.full([BLOCK], EMPTY, bits.dtype), inside)
                total += received.to(dtype, bitcast=True).to(tl.float32)
        x = total.to(dtype).to(tl.float32)
        if residual_ptr is not None:
            x = (x + residual).to(dtype).to(tl.float32)
        tl.store(sum_ptr + at, x.to(dtype), inside)
        if weight_ptr is not None:
            y = weighted(x * tl.rsqrt(tl.sum(x * x, 0) / D + eps), weight, dtype, STYLE)
            tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), inside)
        tl.store(halves_ptr + row, 1 - half)


def all_reduce(x: Tensor, peers: PeerMemory) -> Tensor:
    """The sum of x [..., D] of all ranks."""
    return _launch(x, peers)[1]


def all_reduce_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    peers: PeerMemory,
    style: str = "after",
    *,
    pushes: bool = True,
) -> tuple[Tensor, Tensor]:
    """The norm of the sum of x [..., D] of all ranks and of the residual [..., D], and that sum.

    pushes  False: the second half of an exchange, for which the rows of x have been sent
    """
    out, total = _launch(x, peers, residual, weight, eps, style, pushes=pushes)
    assert out is not None
    return out, total


def push(x: Tensor, peers: PeerMemory) -> None:
    """The first half of an exchange: send the rows of x, and do not wait."""
    _launch(x, peers, reduces=False)


def _launch(
    x: Tensor,
    peers: PeerMemory,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
    style: str = "after",
    *,
    pushes: bool = True,
    reduces: bool = True,
) -> tuple[Tensor | None, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    if rows > peers.rows or width * x.element_size() > ROW_BYTES:
        raise ValueError(
            f"{rows} rows of {width * x.element_size()} bytes in memory for at most "
            f"{peers.rows} of {ROW_BYTES}"
        )
    x = x.contiguous()
    total = torch.empty_like(x)
    out = None if weight is None else torch.empty_like(x, dtype=normed_dtype(x, weight, style))
    bits = torch.int32 if x.element_size() == 4 else torch.int16
    if rows:
        block = triton.next_power_of_2(width)
        _exchange[(rows,)](
            x,
            tuple(buffer.view(bits) for buffer in peers.buffers),
            peers.halves,
            peers.aborted,
            residual if residual is None else residual.contiguous(),
            weight,
            out,
            total,
            eps,
            D=width,
            BLOCK=block,
            ROWS=peers.rows,
            STRIDE=ROW_BYTES // x.element_size(),
            RANK=peers.rank,
            N=peers.size,
            STYLE=style,
            PUSH=pushes,
            REDUCE=reduces,
            num_warps=warps_for(block),
            **overlap(x.device),
        )
    return out, total


def warps_for(block: int) -> int:
    """16 bytes of 16-bit numbers for each thread, twice."""
    return min(max(block // 512, 4), 16)
