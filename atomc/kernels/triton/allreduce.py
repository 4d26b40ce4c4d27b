"""A sum over the GPUs of a host for few tokens, with the add and the norm that follow: each rank
writes its rows into a buffer of every other rank, and sums what it received in the order of the
ranks, so that all ranks compute the same bits.

Two kernels: `push` writes rows, and a flag behind each; `reduce` waits for the flags of all ranks.
A buffer has two halves, which steps use in turn: a rank writes a half again only after it has
received the rows of the step between, whose senders have read that half. The number of the step is
counted for each row in device memory, so that a CUDA graph can replay the kernels.

T tokens, D width, N ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.norm import weighted

MAX_RANKS = 8


@triton.jit
def _of_peer(peer, p0, p1, p2, p3, p4, p5, p6, p7, N: tl.constexpr):
    """The pointer of a peer, of those of N ranks."""
    found = p0
    if N > 1:
        found = tl.where(peer == 1, p1, found)
    if N > 2:
        found = tl.where(peer == 2, p2, found)
    if N > 3:
        found = tl.where(peer == 3, p3, found)
    if N > 4:
        found = tl.where(peer == 4, p4, found)
    if N > 5:
        found = tl.where(peer == 5, p5, found)
    if N > 6:
        found = tl.where(peer == 6, p6, found)
    if N > 7:
        found = tl.where(peer == 7, p7, found)
    return found


@triton.jit(do_not_specialize=["rank", "capacity"])
def _push(
    x_ptr,
    counts_ptr,
    b0,
    b1,
    b2,
    b3,
    b4,
    b5,
    b6,
    b7,
    f0,
    f1,
    f2,
    f3,
    f4,
    f5,
    f6,
    f7,
    rank,
    capacity,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    row, peer = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    step = tl.load(counts_ptr + row) + 1
    slot = ((step % 2) * N + rank) * capacity + row
    x = tl.load(x_ptr + row.to(tl.int64) * D + column, column < D)
    buffer = _of_peer(peer, b0, b1, b2, b3, b4, b5, b6, b7, N)
    tl.store(buffer + slot.to(tl.int64) * D + column, x, column < D)
    tl.debug_barrier()  # all threads have stored their columns before one of them sets the flag
    flags = _of_peer(peer, f0, f1, f2, f3, f4, f5, f6, f7, N)
    tl.atomic_xchg(flags + slot, step, sem="release", scope="sys")


@triton.jit(do_not_specialize=["capacity"])
def _reduce(
    buffer_ptr,
    flags_ptr,
    counts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    capacity,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    STYLE: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = row.to(tl.int64) * D + column
    step = tl.load(counts_ptr + row) + 1
    first = (step % 2) * N * capacity + row
    for source in range(N):
        flag = flags_ptr + first + source * capacity
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != step:
            pass
    tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for source in range(N):
        slot = (first + source * capacity).to(tl.int64)
        total += tl.load(buffer_ptr + slot * D + column, inside, 0.0, volatile=True).to(tl.float32)
    total = total.to(sum_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(residual_ptr + at, inside, 0.0).to(tl.float32)
        total = (total.to(tl.float32) + residual).to(sum_ptr.dtype.element_ty)
    tl.store(sum_ptr + at, total, inside)
    x = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32)
    y = weighted(x * tl.rsqrt(tl.sum(x * x, 0) / D + eps), weight, sum_ptr.dtype.element_ty, STYLE)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), inside)
    tl.store(counts_ptr + row, step)


@dataclass(frozen=True)
class PeerBuffers:
    """What one rank needs to exchange at most `capacity` rows [T, D].

    buffers  of all ranks, own one included, [2, N, capacity, D], in memory that this rank can write
    flags    of all ranks, [2, N, capacity] int32, zeros before the first step
    counts   [capacity] int32 of this rank alone, zeros before the first step
    """

    rank: int
    buffers: Sequence[Tensor]
    flags: Sequence[Tensor]
    counts: Tensor

    def __post_init__(self) -> None:
        count = len(self.buffers)
        if not 2 <= count <= MAX_RANKS:
            raise ValueError(f"{count} ranks exchange rows: written for 2 to {MAX_RANKS}")

    @property
    def capacity(self) -> int:
        return self.counts.shape[0]


def push(x: Tensor, peers: PeerBuffers) -> None:
    """Write the rows of x [T, D], contiguous, into the buffers of all ranks."""
    rows, width = _fitting(x, peers)
    count = len(peers.buffers)
    absent = [None] * (MAX_RANKS - count)
    _push[(rows, count)](
        x,
        peers.counts,
        *peers.buffers,
        *absent,
        *peers.flags,
        *absent,
        peers.rank,
        peers.capacity,
        D=width,
        BLOCK=triton.next_power_of_2(width),
        N=count,
    )


def reduce(
    like: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    peers: PeerBuffers,
    style: str = "after",
) -> tuple[Tensor, Tensor]:
    """The norm of the sum of the rows of all ranks and of the residual, and that sum, for as many
    rows as `like` [T, D] has, which all ranks pushed. residual [T, D] and weight [D], contiguous.
    """
    rows, width = _fitting(like, peers)
    total = torch.empty_like(like)
    dtype = torch.promote_types(like.dtype, weight.dtype) if style == "after" else like.dtype
    out = torch.empty_like(like, dtype=dtype)
    _reduce[(rows,)](
        peers.buffers[peers.rank],
        peers.flags[peers.rank],
        peers.counts,
        residual,
        weight,
        out,
        total,
        peers.capacity,
        eps,
        D=width,
        BLOCK=triton.next_power_of_2(width),
        N=len(peers.buffers),
        STYLE=style,
        ADD=residual is not None,
    )
    return out, total


def _fitting(x: Tensor, peers: PeerBuffers) -> tuple[int, int]:
    """The sizes of rows. Raises ValueError for those that the buffers have no room for."""
    rows, width = x.shape
    if rows > peers.capacity or width != peers.buffers[0].shape[-1]:
        raise ValueError(
            f"rows [{rows}, {width}] in buffers for at most [{peers.capacity}, "
            f"{peers.buffers[0].shape[-1]}]"
        )
    return rows, width
