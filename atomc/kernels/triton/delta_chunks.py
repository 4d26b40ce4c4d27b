"""The gated delta rule of long sequences in Triton, in chunks of 64 tokens (Yang et al. 2024,
"Gated Delta Networks", section 3.3).

`_systems` computes for each chunk what does not depend on the state: the inverse of the triangular
system that says what its tokens store, and the weights with which its queries read it. `_walk`
carries some columns of the state of a head over the chunks of a sequence. The host knows a bound of
the number of programs by shapes (`tokens_of`).

Of 16-bit numbers, products with the state and with what tokens store are in tf32: their second
factor has no 16 bits. The inverse is exact but for rounding in fp32.

T rows, H key heads, N value heads, K key width, V value width, S sequences, C = 64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc.kernels.triton.launch import begin, overlap
from atomc.kernels.triton.sequences import tokens_of
from atomc.kernels.triton.tile_table import Launch
from atomc.ops.delta_rule import L2_EPS

CHUNK, MAX_WIDTH = 64, 256


class Rows(NamedTuple):
    """The arguments of a call; state and state_slots None: all sequences begin, and nothing is
    kept.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor | None
    query_start: Tensor
    seq_lens: Tensor
    state_slots: Tensor | None
    scale: float

    def flat(self) -> "Rows":
        """With T rows instead of a batch."""
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (self.q, self.k, self.v))
        g, beta = (x.reshape(-1, x.shape[-1]) for x in (self.g, self.beta))
        return self._replace(q=q, k=k, v=v, g=g, beta=beta)

    def strides(self) -> tuple[int, ...]:
        """Of rows and heads, and of a slot."""
        of_heads = [x.stride()[:2] for x in (self.q, self.k, self.v)]
        slot = 0 if self.state is None else self.state.stride(0)
        scalars = self.g.stride(0), self.beta.stride(0)
        return (*(stride for pair in of_heads for stride in pair), *scalars, slot)

    def sizes(self) -> dict[str, int]:
        heads, width = self.v.shape[-2:]
        key_width = self.k.shape[-1]
        return {
            "N": heads,
            "GROUP": heads // self.k.shape[-2],
            "K": key_width,
            "V": width,
            "BLOCK_K": max(16, triton.next_power_of_2(key_width)),
        }


@triton.jit
def _normed_rows(
    x_ptr, row, valid, x_row, K: tl.constexpr, BLOCK_K: tl.constexpr, EPS: tl.constexpr
):
    """Rows [C, BLOCK_K] as they are in memory, and the factors [C] that normalize them."""
    column = tl.arange(0, BLOCK_K)
    at = x_ptr + row.to(tl.int64)[:, None] * x_row + column[None, :]
    x = tl.load(at, valid[:, None] & (column < K)[None, :], 0.0)
    wide = x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit
def _decays(g_ptr, row, valid, g_row):
    """The sums of g [C] since the chunk began, as exact multiples of 1/16 and what is left: a
    difference of both is small without a loss where the sums are large.
    """
    g = tl.load(g_ptr + row.to(tl.int64) * g_row, valid, 0.0).to(tl.float32)
    g = tl.maximum(g, -1000.0)  # as good as -inf
    coarse = tl.floor(g * 16.0) / 16.0
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)


@triton.jit
def _inverse(lower, PRECISION: tl.constexpr):
    """The inverse of 1 + lower [64, 64], which is zero on its diagonal and above.

    The four blocks of 16 on the diagonal are inverted row by row. With D, the matrix of these
    inverses, and X = D (lower - its blocks), whose fourth power is zero, the inverse is (1 - X +
    X^2 - X^3) D.
    """
    C: tl.constexpr = 64
    B: tl.constexpr = 16
    row = tl.arange(0, C)
    same_block = (row // B)[:, None] == (row // B)[None, :]
    block = tl.arange(0, C // B)
    on_diagonal = (block[:, None] == block[None, :])[:, None, :, None]
    blocks = tl.reshape(lower, [C // B, B, C // B, B])
    blocks = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)  # [4, 16, 16]
    of_block = tl.arange(0, B)
    inverse = tl.where((of_block[:, None] == of_block[None, :])[None], 1.0, 0.0) + tl.zeros_like(
        blocks
    )
    for i in range(1, B):
        this = (of_block == i)[None, :, None]
        weights = tl.sum(tl.where(this, blocks, 0.0), 1)  # [4, 16]: row i of each block
        found = tl.sum(weights[:, :, None] * inverse, 1)
        inverse -= tl.where(this, found[:, None, :], 0.0)
    wide = tl.where(on_diagonal, tl.expand_dims(inverse, 2), 0.0)
    diagonal = tl.reshape(wide, [C, C])
    beside = tl.where(same_block, 0.0, lower)
    x = tl.dot(diagonal, beside, input_precision=PRECISION)
    squared = tl.dot(x, x, input_precision=PRECISION)
    series = squared - x - tl.dot(x, squared, input_precision=PRECISION)
    return diagonal + tl.dot(series, diagonal, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _systems(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    out_ptr,
    inverse_ptr,
    weights_ptr,
    query_start,
    seq_lens,
    num_rows,
    num_sequences,
    q_row,
    q_head,
    k_row,
    k_head,
    g_row,
    beta_row,
    scale,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
    EPS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """For one chunk of one head, if its sequence has more than MOST new tokens: the rows of inverse
    and weights [T, N, C] fp32. Zeros in the rows of the result that belong to no sequence.
    """
    begin(PDL)
    C: tl.constexpr = 64
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s, start, end, _, first, _ = tokens_of(tile, query_start, seq_lens, num_rows, num_sequences, C)
    each = tl.arange(0, C)
    row = start + first + each
    valid = row < end
    if s >= num_sequences:
        column = tl.arange(0, BLOCK_V)
        at = out_ptr + (row.to(tl.int64)[:, None] * N + head) * V + column[None, :]
        zeros = tl.zeros([C, BLOCK_V], out_ptr.dtype.element_ty)
        tl.store(at, zeros, valid[:, None] & (column < V)[None, :])
    elif (end - start > MOST) & (start + first < end):
        key_head = head // GROUP
        k, k_norm = _normed_rows(k_ptr + key_head * k_head, row, valid, k_row, K, BLOCK_K, EPS)
        q, q_norm = _normed_rows(q_ptr + key_head * q_head, row, valid, q_row, K, BLOCK_K, EPS)
        beta_at = beta_ptr + row.to(tl.int64) * beta_row + head
        beta = tl.load(beta_at, valid, 0.0).to(tl.float32)
        coarse, fine = _decays(g_ptr + head, row, valid, g_row)
        earlier = each[:, None] > each[None, :]
        since = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        same = each[:, None] == each[None, :]
        between = tl.exp(tl.where(earlier, since, tl.where(same, 0.0, -float("inf"))))
        turned = tl.trans(k)
        products = tl.dot(k, turned, input_precision="ieee")
        products *= k_norm[:, None] * k_norm[None, :] * beta[:, None]
        inverse = _inverse(tl.where(earlier, products * between, 0.0), EXACT)
        weights = tl.dot(q, turned, input_precision="ieee") * between
        weights *= (q_norm * scale)[:, None] * k_norm[None, :]
        into = (row.to(tl.int64)[:, None] * N + head) * C + each[None, :]
        tl.store(inverse_ptr + into, inverse, valid[:, None])
        tl.store(weights_ptr + into, weights, valid[:, None])


@triton.jit(do_not_specialize=["num_sequences"])
def _walk(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    inverse_ptr,
    weights_ptr,
    query_start,
    seq_lens,
    state_slots,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    beta_row,
    state_slot,
    scale,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
    EPS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of the values of one head, over all chunks of a sequence."""
    begin(PDL)
    C: tl.constexpr = 64
    head = tl.program_id(1)
    s = tl.program_id(2)
    start = tl.load(query_start + s)
    end = tl.load(query_start + s + 1)
    if end - start > MOST:
        key = tl.arange(0, BLOCK_K)
        column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = (key < K)[:, None] & (column < V)[None, :]
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        state_at = key[:, None] * V + column[None, :]
        if state_ptr is not None:
            length = tl.load(seq_lens + s)
            slot = tl.load(state_slots + s).to(tl.int64)
            state_at = state_ptr + slot * state_slot + head * (K * V) + state_at
            state = tl.load(state_at, inside & (length > end - start), 0.0)
        each = tl.arange(0, C)
        k_ptr += head // GROUP * k_head
        q_ptr += head // GROUP * q_head
        for first in range(start, end, C):
            row = first + each
            valid = row < end
            at = row.to(tl.int64)
            k, k_norm = _normed_rows(k_ptr, row, valid, k_row, K, BLOCK_K, EPS)
            q, q_norm = _normed_rows(q_ptr, row, valid, q_row, K, BLOCK_K, EPS)
            v_at = v_ptr + at[:, None] * v_row + head * v_head + column[None, :]
            there = valid[:, None] & (column < V)[None, :]
            v = tl.load(v_at, there, 0.0).to(tl.float32)
            beta = tl.load(beta_ptr + at * beta_row + head, valid, 0.0).to(tl.float32)
            square = (at[:, None] * N + head) * C + each[None, :]
            inverse = tl.load(inverse_ptr + square, valid[:, None], 0.0)
            weights = tl.load(weights_ptr + square, valid[:, None], 0.0)
            coarse, fine = _decays(g_ptr + head, row, valid, g_row)
            decay = tl.exp(coarse + fine)
            is_last = each == C - 1
            last_coarse = tl.sum(tl.where(is_last, coarse, 0.0), 0)
            last_fine = tl.sum(tl.where(is_last, fine, 0.0), 0)
            to_last = tl.exp((last_coarse - coarse) + (last_fine - fine))

            known = tl.dot(k.to(tl.float32), state, input_precision=PRODUCTS)
            wanted = beta[:, None] * (v - (decay * k_norm)[:, None] * known)
            stored = tl.dot(inverse, wanted, input_precision=PRODUCTS)
            read = tl.dot(q.to(tl.float32), state, input_precision=PRODUCTS)
            out = (decay * q_norm * scale)[:, None] * read
            out = tl.dot(weights, stored, out, input_precision=PRODUCTS)
            stored *= (k_norm * to_last)[:, None]
            state = tl.dot(
                tl.trans(k.to(tl.float32)),
                stored,
                state * tl.exp(last_coarse + last_fine),
                input_precision=PRODUCTS,
            )
            out_at = out_ptr + (at[:, None] * N + head) * V + column[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), there)
        if state_ptr is not None:
            tl.store(state_at, state, inside)


def launch_chunks(rows: Rows, out: Tensor, most: int, tile: Launch) -> None:
    """Fill `out` and replace the states of sequences with more than `most` new tokens; zeros for
    rows of no sequence. rows: flat
    """
    num_rows, heads, width = rows.v.shape
    num_sequences = rows.seq_lens.shape[0]
    tiles = num_rows // CHUNK + num_sequences + 1
    # Row t of the matrices of its chunk.
    shape = (num_rows, heads, CHUNK)
    inverse, weights = (out.new_empty(shape, dtype=torch.float32) for _ in range(2))
    # AMD has no tf32; the interpreter computes all products in fp32.
    tensor_cores = rows.k.dtype != torch.float32 and torch.version.hip is None
    q_row, q_head, k_row, k_head, v_row, v_head, g_row, beta_row, slot = rows.strides()
    _systems[(tiles, heads)](
        rows.q,
        rows.k,
        rows.g,
        rows.beta,
        out,
        inverse,
        weights,
        rows.query_start,
        rows.seq_lens,
        num_rows,
        num_sequences,
        q_row,
        q_head,
        k_row,
        k_head,
        g_row,
        beta_row,
        rows.scale,
        **rows.sizes(),
        BLOCK_V=triton.next_power_of_2(width),
        MOST=most,
        EPS=L2_EPS,
        EXACT="tf32x3" if tensor_cores else "ieee",
        num_warps=4,
        **overlap(out.device),
    )
    block = max(16, min(tile["BLOCK_V"], triton.next_power_of_2(width)))
    _walk[(triton.cdiv(width, block), heads, num_sequences)](
        rows.q,
        rows.k,
        rows.v,
        rows.g,
        rows.beta,
        rows.state,
        out,
        inverse,
        weights,
        rows.query_start,
        rows.seq_lens,
        rows.state_slots,
        q_row,
        q_head,
        k_row,
        k_head,
        v_row,
        v_head,
        g_row,
        beta_row,
        slot,
        rows.scale,
        **rows.sizes(),
        BLOCK_V=block,
        MOST=most,
        EPS=L2_EPS,
        PRODUCTS="tf32" if tensor_cores else "ieee",
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
        **overlap(out.device),
    )
