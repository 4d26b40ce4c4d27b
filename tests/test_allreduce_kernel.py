"""Ranks of one process exchange rows through each other's buffers: all push, then all reduce."""

import pytest
import torch

from atomc import kernels, ops

pytest.importorskip("triton")
assert kernels.load("triton") is None
from atomc.kernels.triton.allreduce import PeerBuffers, push, reduce  # noqa: E402

DRAW = torch.Generator().manual_seed(0)


def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=DRAW).to(dtype)


def peers_of(ranks, capacity, width, dtype=torch.bfloat16):
    """Of each rank; rows that were not written are NaN."""
    buffers = [
        torch.full((2, ranks, capacity, width), torch.nan, dtype=dtype) for _ in range(ranks)
    ]
    flags = [torch.zeros(2, ranks, capacity, dtype=torch.int32) for _ in range(ranks)]
    return [
        PeerBuffers(rank, buffers, flags, torch.zeros(capacity, dtype=torch.int32))
        for rank in range(ranks)
    ]


def step(peers, rows, residual, weight, style="after"):
    """The results of one step on all ranks, which are equal bit by bit."""
    for own, x in zip(peers, rows, strict=True):
        push(x, own)
    results = [
        reduce(x, residual, weight, 1e-6, own, style) for own, x in zip(peers, rows, strict=True)
    ]
    for y, total in results:
        assert torch.equal(y, results[0][0]) and torch.equal(total, results[0][1])
    return results[0]


def expected(rows, residual, weight, style="after"):
    """Summed in fp32 in the order of the ranks, rounded once."""
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for x in rows:
        total = total + x.float()
    summed = total.to(rows[0].dtype)
    if residual is None:
        return ops.rms_norm.reference(summed, weight, 1e-6, style), summed
    return ops.add_rms_norm.reference(summed, residual, weight, 1e-6, style)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("added", [True, False])
def test_all_ranks_have_the_norm_of_the_sum_in_every_step(ranks, added):
    capacity, width = 5, 80
    peers, weight = peers_of(ranks, capacity, width), rand(width)
    for tokens in (3, 5, 2):  # both halves, with rows that some steps leave out
        rows = [rand(tokens, width) for _ in range(ranks)]
        residual = rand(tokens, width) if added else None
        y, total = step(peers, rows, residual, weight)
        wanted, sums = expected(rows, residual, weight)
        assert torch.equal(total, sums)
        torch.testing.assert_close(y, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("style", ["before", "one_plus"])
def test_every_style_and_odd_width(style):
    peers, weight = peers_of(2, 3, 257, torch.float32), rand(257, dtype=torch.float32)
    rows, residual = [rand(3, 257, dtype=torch.float32) for _ in range(2)], rand(3, 257).float()
    y, total = step(peers, rows, residual, weight, style)
    wanted, sums = expected(rows, residual, weight, style)
    assert torch.equal(total, sums)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)


def test_a_rank_may_push_the_next_step_before_another_has_read_this_one():
    ranks, width = 2, 16
    peers, weight = peers_of(ranks, 2, width), rand(width)
    first, second = ([rand(2, width) for _ in range(ranks)] for _ in range(2))
    for own, x in zip(peers, first, strict=True):
        push(x, own)
    ahead, behind = peers
    reduce(first[0], None, weight, 1e-6, ahead)
    push(second[0], ahead)  # the other rank has not read the first step yet
    late = reduce(first[1], None, weight, 1e-6, behind)
    assert torch.equal(late[1], expected(first, None, weight)[1])
    push(second[1], behind)
    for own, x in zip(peers, second, strict=True):
        _, total = reduce(x, None, weight, 1e-6, own)
        assert torch.equal(total, expected(second, None, weight)[1])


def test_rows_without_room_and_a_single_rank_are_refused():
    peers = peers_of(2, 2, 16)
    with pytest.raises(ValueError, match=r"rows \[3, 16\] in buffers for at most \[2, 16\]"):
        push(rand(3, 16), peers[0])
    with pytest.raises(ValueError, match="1 ranks exchange rows: written for 2 to 8"):
        peers_of(1, 2, 16)
