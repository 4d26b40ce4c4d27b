"""Products with one weight for each head, as latent attention has them before and after attention
over what was cached before the step: only tiles of tokens that have such keys are computed.

A program takes BLOCK_M rows of some heads. T rows, H heads, P and R widths of a query, not rotated
and rotated, L latent width, V width of a value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.attention.attention_tiles import has_room, multiprocessors
from atomc.kernels.triton.attention.sequences import some_have_prefix
from atomc.kernels.triton.launch.launch import (
    dot_size,
    indexed,
    item,
    let_next_start,
    overlap,
    wait_for_last,
)

# Programs of a multiprocessor, so that the heads of a tile without such keys are left out together.
PROGRAMS = 4


class Products(NamedTuple):
    """Tiles of `rows` x `columns` of the result; `depth`: columns of x per step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


# H200, 4,096 tokens with 128 heads, all with a prefix, us (cuBLAS and a copy: 302 and 352):
# TO_LATENTS, which has no steps, since it takes all P, 311, with 128 columns 497; TO_VALUES 302,
# with 3 stages 330. Without prefixes 4 and 9.
TO_LATENTS = Products(128, 64, 0, 8, 3)
TO_VALUES = Products(128, 0, 64, 8, 4)  # all V columns
SMALL = Products(32, 32, 32, 4, 2)  # for fp32, and with less shared memory


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "heads_each"])
def _queries_to_latents(
    q,
    weight,
    out_ptr,
    query_start,
    seq_lens,
    num_rows,
    num_sequences,
    heads_each,
    H: constexpr,
    P: constexpr,
    R: constexpr,
    L: constexpr,
    BLOCK_P: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    PDL: constexpr,
):
    wait_for_last(PDL)
    first = tl.program_id(0) * BLOCK_M
    if some_have_prefix(first, first + BLOCK_M, query_start, seq_lens, num_sequences):
        row = (first + tl.arange(0, BLOCK_M))[:, None]
        p = tl.arange(0, BLOCK_P)
        r = tl.arange(0, triton.next_power_of_2(R))[None, :]
        first_head = tl.program_id(1) * heads_each
        for head in range(first_head, tl.minimum(first_head + heads_each, H)):
            q_at = item(q, row.to(tl.int64), head)
            w_at = weight.ptr + tl.cast(head, tl.int64) * weight.s0 + p[:, None] * L
            out_at = out_ptr + (row.to(tl.int64) * H + head) * (L + R)
            query = tl.load(q_at + p[None, :], (row < num_rows) & (p < P)[None, :], 0.0)
            for start in range(0, L, BLOCK_N):
                n = start + tl.arange(0, BLOCK_N)[None, :]
                w = tl.load(w_at + n, (p < P)[:, None] & (n < L), 0.0)
                out = tl.dot(query, w, input_precision="ieee")
                tl.store(out_at + n, out.to(out_ptr.dtype.element_ty), (row < num_rows) & (n < L))
            rotated = (row < num_rows) & (r < R)
            tl.store(out_at + L + r, tl.load(q_at + P + r, rotated), rotated)
    let_next_start(PDL)


@triton.jit(do_not_specialize=["num_rows", "heads_each"])
def _add_values(
    latents_ptr,
    weight,
    lse_ptr,
    out_ptr,
    new_lse_ptr,
    num_rows,
    heads_each,
    H: constexpr,
    L: constexpr,
    V: constexpr,
    BLOCK_V: constexpr,
    BLOCK_M: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """Whether a row has keys is the same for all heads; a result without is uninitialized."""
    wait_for_last(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    without = -float("inf")
    old_lse = tl.load(lse_ptr + row * H, row < num_rows, without)
    new_lse = tl.load(new_lse_ptr + row * H, row < num_rows, 0.0)
    # Rows of sequences without old keys have their result; rows without any key get zeros.
    old_there = old_lse > without
    if tl.max((old_there | (new_lse == without)).to(tl.int32)) > 0:
        v = tl.arange(0, BLOCK_V)
        k = tl.arange(0, BLOCK_K)
        first_head = tl.program_id(1) * heads_each
        for head in range(first_head, tl.minimum(first_head + heads_each, H)):
            at = row.to(tl.int64) * H + head
            x_at = latents_ptr + at[:, None] * L + k[None, :]
            w_at = weight.ptr + tl.cast(head, tl.int64) * weight.s0 + v[:, None] * L + k[None, :]
            old = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            for start in range(0, L, BLOCK_K):
                inside = (k < L - start)[None, :]
                x = tl.load(x_at + start, old_there[:, None] & inside, 0.0)
                w = tl.load(w_at + start, (v < V)[:, None] & inside, 0.0)
                old = tl.dot(x, tl.trans(w), old, input_precision="ieee")
            old_lse = tl.load(lse_ptr + at, row < num_rows, without)
            new_lse = tl.load(new_lse_ptr + at, row < num_rows, without)
            peak = tl.maximum(old_lse, new_lse)
            peak = tl.where(peak > without, peak, 0.0)
            of_old, of_new = tl.exp2(old_lse - peak), tl.exp2(new_lse - peak)
            total = of_old + of_new
            total = tl.where(total > 0.0, total, 1.0)
            out_at = out_ptr + at[:, None] * V + v[None, :]
            inside = (row < num_rows)[:, None] & (v < V)[None, :]
            new = tl.load(out_at, inside & (new_lse > without)[:, None], 0.0).to(tl.float32)
            out = (of_new[:, None] * new + of_old[:, None] * old) / total[:, None]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), inside)
    let_next_start(PDL)


def queries_to_latents(
    q: Tensor, of_head: Tensor, query_start: Tensor, seq_lens: Tensor, rotated: int
) -> Tensor:
    """The queries [T, H, P + R] of sequences that have tokens from before the step in the latent
    space, [T, H, L + R]; those of other sequences may be uninitialized. of_head: [H, P + V, L].
    """
    tokens, heads, width = q.shape
    latent, nope = of_head.shape[-1], width - rotated
    out = q.new_empty((tokens, heads, latent + rotated))
    tile = _fitting(TO_LATENTS, q)
    tiles = triton.cdiv(tokens, tile.rows)
    each = _heads_each(tiles, heads, q.device)
    _queries_to_latents[(tiles, triton.cdiv(heads, each))](
        *map(indexed, (q, of_head)),
        out,
        query_start,
        seq_lens,
        tokens,
        seq_lens.shape[0],
        each,
        H=heads,
        P=nope,
        R=rotated,
        L=latent,
        BLOCK_P=dot_size(nope),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(q.device),
    )
    return out


def add_values(
    out: Tensor, new_lse: Tensor, latents: Tensor, old_lse: Tensor, of_value: Tensor
) -> None:
    """Adds to `out` [T, H, V], the results over some keys, those over others, whose values are
    computed from `latents` [T, H, L] by of_value [H, V, L]. lse: the logarithms in base 2 of the
    softmax masses of the keys, [T, H] in fp32; where it is -inf the result is not read.
    """
    tokens, heads, values = out.shape
    tile = _fitting(TO_VALUES, out)
    tiles = triton.cdiv(tokens, tile.rows)
    each = _heads_each(tiles, heads, out.device)
    _add_values[(tiles, triton.cdiv(heads, each))](
        latents,
        indexed(of_value),
        old_lse,
        out,
        new_lse,
        tokens,
        each,
        H=heads,
        L=latents.shape[-1],
        V=values,
        BLOCK_V=dot_size(values),
        BLOCK_M=tile.rows,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(out.device),
    )


def _fitting(tile: Products, x: Tensor) -> Products:
    return SMALL if x.element_size() == 4 or not has_room(x.device) else tile


def _heads_each(tiles: int, heads: int, device: torch.device) -> int:
    """How many heads a program takes: a power of two, so that programs take equally many."""
    most = max(tiles * heads // (PROGRAMS * multiprocessors(device)), 1)
    return int(2 ** (most.bit_length() - 1))
