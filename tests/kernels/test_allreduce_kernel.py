"""Ranks of one process exchange rows through each other's buffers: all push, then all reduce."""

from functools import partial

import pytest
import torch
from fake_group import equal_ranks

from atomc import kernels, ops
from atomc.torch_compat import peer_memory
from atomc.torch_compat.peer_memory import EMPTY, PeerMemory, new_buffer, new_halves

pytest.importorskip("triton")
assert kernels.load("triton") is None
from atomc.kernels.triton.collective import allreduce_norm, collective  # noqa: E402
from atomc.kernels.triton.collective.allreduce import (  # noqa: E402
    all_reduce_rms_norm,
    push,
)

DRAW = torch.Generator().manual_seed(0)


def rand(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=DRAW).to(dtype)


reduce = partial(all_reduce_rms_norm, pushes=False)


def peers_of(ranks):
    """Of each rank."""
    buffers = [new_buffer(ranks) for _ in range(ranks)]
    return [
        PeerMemory(rank, buffers, new_halves(ranks), torch.zeros(1, dtype=torch.int32))
        for rank in range(ranks)
    ]


def bits(x):
    return x.view(torch.int32 if x.itemsize == 4 else torch.int16)


def step(peers, rows, residual, weight, style="after"):
    """The results of one step on all ranks, which are equal bit by bit."""
    for own, x in zip(peers, rows, strict=True):
        push(x, own)
    results = [
        reduce(x, residual, weight, 1e-6, own, style) for own, x in zip(peers, rows, strict=True)
    ]
    for y, total in results:
        assert torch.equal(bits(y), bits(results[0][0]))
        assert torch.equal(bits(total), bits(results[0][1]))
    assert all((buffer == EMPTY).all() for buffer in peers[0].buffers)
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
    width = 80
    peers, weight = peers_of(ranks), rand(width)
    for tokens in (3, 5, 2, 4):  # both halves, with rows that some steps leave out
        rows = [rand(tokens, width) for _ in range(ranks)]
        residual = rand(tokens, width) if added else None
        y, total = step(peers, rows, residual, weight)
        wanted, sums = expected(rows, residual, weight)
        assert torch.equal(total, sums)
        torch.testing.assert_close(y, wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("style", ["before", "one_plus"])
def test_every_style_and_odd_width(style):
    peers, weight = peers_of(2), rand(257, dtype=torch.float32)
    rows, residual = [rand(3, 257, dtype=torch.float32) for _ in range(2)], rand(3, 257).float()
    y, total = step(peers, rows, residual, weight, style)
    wanted, sums = expected(rows, residual, weight, style)
    assert torch.equal(total, sums)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)


REFERENCES = {
    "allreduce_add_rms_norm": ops.allreduce_add_rms_norm.reference,
    "allreduce_add_rms_norm_quant": ops.allreduce_add_rms_norm_quant.reference,
}
SCHEME = {"scheme": "fp8_per_token", "dtype": torch.float8_e4m3fn, "keep": True}


@pytest.mark.parametrize("provider", ["reference", "torch", "peer memory"])
@pytest.mark.parametrize("name", list(REFERENCES))
def test_x_is_summed_over_ranks_and_the_residual_is_not(provider, name, monkeypatch):
    x, residual, weight = rand(3, 64), rand(3, 64), rand(64)
    if provider == "peer memory":
        own, other = peers_of(2)
        push(x, other)
        monkeypatch.setattr(peer_memory, "of", {"both": own}.__getitem__)
    module = allreduce_norm if provider == "peer memory" else collective
    function = REFERENCES[name] if provider == "reference" else getattr(module, name)
    group = "both" if provider == "peer memory" else equal_ranks(2)
    arguments = {"weight": weight, "eps": 1e-6, "process_group": group, "style": "after"}
    if name.endswith("quant"):
        whole = {**SCHEME, "scale": None, "group": 0, "column_major": False, "rounding": "even"}
        *_, total, y = function(x, residual, **arguments, **whole)
    else:
        y, total = function(x, residual, **arguments)
    wanted, sums = expected([x, x], residual, weight)
    assert torch.equal(total, sums)
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=1e-6)


def test_a_rank_may_push_the_next_step_before_another_has_read_this_one():
    ranks, width = 2, 16
    peers, weight = peers_of(ranks), rand(width)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_with_the_bits_of_an_empty_place_are_received(dtype):
    peers, weight = peers_of(2), rand(16, dtype=dtype)
    empty = torch.full((2, 16), EMPTY, dtype=torch.int16).repeat(1, dtype.itemsize // 2)
    negative, ones = empty.view(dtype), torch.ones(2, 16, dtype=dtype)
    _, total = step(peers, [negative, ones], None, weight)
    assert torch.equal(total, ones)
    _, total = step(peers, [negative, negative], None, weight)
    assert torch.equal(total, torch.zeros_like(total)) and not total.signbit().any()


def test_nan_and_infinity_are_received():
    peers, weight = peers_of(2), rand(4)
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]]).bfloat16()
    _, total = step(peers, [x, torch.ones_like(x)], None, weight)
    torch.testing.assert_close(total, x + 1, equal_nan=True)


def test_a_wait_for_a_dead_peer_ends_when_it_is_aborted():
    peers = peers_of(2)
    peers[0].aborted.fill_(1)
    x = rand(1, 16)
    _, total = reduce(x, None, rand(16), 1e-6, peers[0])
    assert torch.equal(total, x)  # nothing was received


def test_rows_without_room_and_a_single_rank_are_refused():
    peers = peers_of(2)
    with pytest.raises(ValueError, match="513 rows of 32 bytes in memory for at most 512 of 16384"):
        push(rand(513, 16), peers[0])
    with pytest.raises(ValueError, match="1 rows of 16386 bytes"):
        push(rand(1, 8193), peers[0])
    with pytest.raises(ValueError, match="1 ranks exchange rows: written for 2 to 8"):
        peers_of(1)
