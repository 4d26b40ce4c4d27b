"""The gated delta rule of long sequences in Triton, in chunks of 64 tokens (Yang et al. 2024,
"Gated Delta Networks", section 3.3).

`_systems` computes for each chunk what does not depend on the state: the inverse of the triangular
system that says what its tokens store, the weights with which its queries read it, and the factors
of its tokens. `_walk` carries some columns of the state of a head over the chunks of a sequence.
The host knows a bound of the number of programs by shapes (`tokens_of`).

Where q, k and v have 16 bits, a factor in fp32 is the sum of two in bf16 (the rest is below 2^-16
of it), and a product is the sum of theirs on tensor cores, without that of both low parts.

T rows, H key heads, N value heads, K key width, V value width, S sequences, C = 64.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc.kernels.triton.attention.sequences import tokens_of
from atomc.kernels.triton.launch.launch import Indexed, begin, dot_size, indexed, item, overlap
from atomc.kernels.triton.launch.tile_table import Launch
from atomc.ops.delta_rule import L2_EPS

CHUNK, MAX_WIDTH = 64, 256
# Of 16 columns Triton 3.6 makes reads of shared memory outside of it, for sm90.
LEAST_COLUMNS = 32
EPS = constexpr(L2_EPS)


class DeltaRows(NamedTuple):
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

    def flat(self) -> "DeltaRows":
        """With T rows instead of a batch."""
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (self.q, self.k, self.v))
        g, beta = (x.reshape(-1, x.shape[-1]) for x in (self.g, self.beta))
        return self._replace(q=q, k=k, v=v, g=g, beta=beta)

    def indexed(self) -> tuple[Indexed | Tensor | float | None, ...]:
        """As arguments of a kernel, which indexes rows and heads, and slots."""
        return *map(indexed, self[:6]), *self[6:]

    def sizes(self) -> dict[str, int]:
        heads, width = self.v.shape[-2:]
        key_width = self.k.shape[-1]
        return {
            "N": heads,
            "GROUP": heads // self.k.shape[-2],
            "K": key_width,
            "V": width,
            "BLOCK_K": dot_size(key_width),
        }


class Systems(NamedTuple):
    """What `_systems` computes: inverse and weights [planes, T, N, C], factors [T, N, 4]. plane:
    their stride.
    """

    inverse: Tensor
    weights: Tensor
    factors: Tensor
    plane: int


@triton.jit
def delta_step(state, q, k, v, decay, beta, scale):
    """The state [K, V] after a token, and its result [V]; all in fp32, the decay as a logarithm."""
    k *= tl.rsqrt(tl.sum(k * k, 0) + EPS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + EPS) * scale
    state *= tl.exp(decay)
    # Both sums read the same state: the second adds what this token stores.
    delta = beta * (v - tl.sum(k[:, None] * state, 0))
    out = tl.sum(q[:, None] * state, 0) + tl.sum(q * k, 0) * delta
    return state + k[:, None] * delta[None, :], out


@triton.jit
def _normed_rows(x, row, head, valid, K: constexpr, BLOCK_K: constexpr):
    """Rows [C, BLOCK_K] as they are in memory, and the factors [C] that normalize them."""
    column = tl.arange(0, BLOCK_K)
    at = item(x, 0, head) + row.to(tl.int64)[:, None] * x.s0 + column[None, :]
    x = tl.load(at, valid[:, None] & (column < K)[None, :], 0.0)
    wide = x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(wide * wide, 1) + EPS)


@triton.jit
def _decays(g, row, head, valid):
    """The sums of g [C] since the chunk began, as exact multiples of 1/16 and what is left: a
    difference of both is small without a loss where the sums are large.
    """
    g = tl.load(item(g, 0, head) + row.to(tl.int64) * g.s0, valid, 0.0).to(tl.float32)
    g = tl.maximum(g, -1000.0)  # as good as -inf
    coarse = tl.floor(g * 16.0) / 16.0
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)


@triton.jit
def _bf16_terms(x):
    """x as the sum of two terms in bf16."""
    high = x.to(tl.bfloat16)
    return high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _product(x, low, y, sums, TERMS: constexpr):
    """sums + (x + low) @ y in fp32, y in fp32. TERMS 1: all in fp32, without low; 2: low is 0."""
    if TERMS == 1:
        return tl.dot(x.to(tl.float32), y, sums, input_precision="ieee")
    else:
        y, y_low = _bf16_terms(y)
        if TERMS == 3:
            sums = tl.dot(low, y, sums)
        return tl.dot(x, y, tl.dot(x, y_low, sums))


@triton.jit
def _matrix_product(x, y, TERMS: constexpr):
    """x @ y, both in fp32 and square."""
    if TERMS == 1:
        return tl.dot(x, y, input_precision="ieee")
    else:
        high, low = _bf16_terms(x)
        return _product(high, low, y, tl.zeros(x.shape, tl.float32), 3)


@triton.jit
def _inverse(lower, TERMS: constexpr):
    """The inverse of 1 + lower [64, 64], which is zero on its diagonal and above.

    By blocks on the diagonal, each of two whose inverses A and B are known: with X below them, the
    inverse is A and B, and -B X A below.
    """
    index = tl.arange(0, 64)
    row, column = index[:, None], index[None, :]
    pair = row // 2 == column // 2
    inverse = tl.where(row == column, 1.0, tl.where(pair, -lower, 0.0))
    for bits in range(1, 6):  # of the index in a block
        below = (row >> bits > column >> bits) & (row >> (bits + 1) == column >> (bits + 1))
        x = _matrix_product(tl.where(below, lower, 0.0), inverse, TERMS)
        inverse -= _matrix_product(inverse, x, TERMS)
    return inverse


@triton.jit
def _store(at, x, valid, plane, TERMS: constexpr):
    """x in fp32, or as two terms in bf16 in two planes."""
    if TERMS == 1:
        tl.store(at, x, valid)
    else:
        high, low = _bf16_terms(x)
        tl.store(at, high, valid)
        tl.store(at + plane, low, valid)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _systems(
    q_rows,
    k_rows,
    v_rows,
    g_rows,
    beta_rows,
    states,
    query_start,
    seq_lens,
    state_slots,
    scale,
    out_ptr,
    systems,
    num_rows,
    num_sequences,
    N: constexpr,
    GROUP: constexpr,
    K: constexpr,
    V: constexpr,
    BLOCK_K: constexpr,
    MOST: constexpr,
    TERMS: constexpr,
    PDL: constexpr,
):
    """For one chunk of one head, if its sequence has more than MOST new tokens: the rows of inverse
    (times beta) and weights [planes, T, N, C] and of factors [T, N, 4]. Zeros in the rows of the
    result that belong to no sequence.

    factors  of a token: of what the state knows of its key, of what its query reads there, of its
             key where it is stored, and of the state, from the chunk before
    """
    begin(PDL)
    C: constexpr = 64
    tile = tl.program_id(0)
    head = tl.program_id(1)
    s, start, end, _, first, _ = tokens_of(tile, query_start, seq_lens, num_rows, num_sequences, C)
    each = tl.arange(0, C)
    row = start + first + each
    valid = row < end
    if s >= num_sequences:
        column = tl.arange(0, triton.next_power_of_2(V))
        at = out_ptr + (row.to(tl.int64)[:, None] * N + head) * V + column[None, :]
        zeros = tl.zeros(at.shape, out_ptr.dtype.element_ty)
        tl.store(at, zeros, valid[:, None] & (column < V)[None, :])
    elif (end - start > MOST) & (start + first < end):
        key_head = head // GROUP
        k, k_norm = _normed_rows(k_rows, row, key_head, valid, K, BLOCK_K)
        q, q_norm = _normed_rows(q_rows, row, key_head, valid, K, BLOCK_K)
        beta = tl.load(item(beta_rows, row.to(tl.int64), head), valid, 0.0).to(tl.float32)
        coarse, fine = _decays(g_rows, row, head, valid)
        earlier = each[:, None] > each[None, :]
        since = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
        same = each[:, None] == each[None, :]
        between = tl.exp(tl.where(earlier, since, tl.where(same, 0.0, -float("inf"))))
        turned = tl.trans(k)
        products = tl.dot(k, turned, input_precision="ieee")
        products *= k_norm[:, None] * k_norm[None, :] * beta[:, None]
        inverse = _inverse(tl.where(earlier, products * between, 0.0), TERMS)
        weights = tl.dot(q, turned, input_precision="ieee") * between
        weights *= (q_norm * scale)[:, None] * k_norm[None, :]
        into = (row.to(tl.int64)[:, None] * N + head) * C + each[None, :]
        there, plane = valid[:, None], systems.plane
        _store(systems.inverse + into, inverse * beta[None, :], there, plane, TERMS)
        _store(systems.weights + into, weights, there, plane, TERMS)
        is_last = each == C - 1
        last_coarse = tl.sum(tl.where(is_last, coarse, 0.0), 0)
        last_fine = tl.sum(tl.where(is_last, fine, 0.0), 0)
        decay = tl.exp(coarse + fine)
        of_token = systems.factors + (row.to(tl.int64) * N + head) * 4
        tl.store(of_token, decay * k_norm, valid)
        tl.store(of_token + 1, decay * q_norm * scale, valid)
        to_last = tl.exp((last_coarse - coarse) + (last_fine - fine))
        tl.store(of_token + 2, k_norm * to_last, valid)
        tl.store(of_token + 3, tl.exp(last_coarse + last_fine) + tl.zeros_like(decay), valid)


@triton.jit
def _walk(
    q_rows,
    k_rows,
    v_rows,
    g_rows,
    beta_rows,
    states,
    query_start,
    seq_lens,
    state_slots,
    scale,
    out_ptr,
    systems,
    N: constexpr,
    GROUP: constexpr,
    K: constexpr,
    V: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
    MOST: constexpr,
    TERMS: constexpr,
    PDL: constexpr,
):
    """Some columns of the values of one head, over all chunks of a sequence."""
    begin(PDL)
    C: constexpr = 64
    MATRIX_TERMS: constexpr = 1 if TERMS == 1 else 3
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
        if states is not None:
            length = tl.load(seq_lens + s)
            slot = tl.load(state_slots + s).to(tl.int64)
            state_at = states.ptr + slot * states.s0 + head * (K * V) + state_at
            state = tl.load(state_at, inside & (length > end - start), 0.0)
        each = tl.arange(0, C)
        k_at = item(k_rows, 0, head // GROUP) + key[None, :]
        q_at = item(q_rows, 0, head // GROUP) + key[None, :]
        passes_at = systems.factors + (start.to(tl.int64) * N + head) * 4 + 3
        none = tl.zeros([C, BLOCK_V], tl.float32)
        for first in range(start, end, C):
            row = first + each
            valid = row < end
            at = row.to(tl.int64)
            there = valid[:, None] & (key < K)[None, :]
            k = tl.load(k_at + at[:, None] * k_rows.s0, there, 0.0)
            q = tl.load(q_at + at[:, None] * q_rows.s0, there, 0.0)
            there = valid[:, None] & (column < V)[None, :]
            v = tl.load(item(v_rows, at[:, None], head) + column[None, :], there, 0.0)
            square = (at[:, None] * N + head) * C + each[None, :]
            inverse = tl.load(systems.inverse + square, valid[:, None], 0.0)
            weights = tl.load(systems.weights + square, valid[:, None], 0.0)
            inverse_low, weights_low, k_low, q_low = inverse, weights, k, q
            if TERMS > 1:
                plane = systems.plane
                inverse_low = tl.load(systems.inverse + plane + square, valid[:, None], 0.0)
                weights_low = tl.load(systems.weights + plane + square, valid[:, None], 0.0)
            if TERMS == 3:
                k, k_low = _bf16_terms(k)
                q, q_low = _bf16_terms(q)
            of_token = systems.factors + (at * N + head) * 4
            knows = tl.load(of_token, valid, 0.0)
            reads = tl.load(of_token + 1, valid, 0.0)
            stores = tl.load(of_token + 2, valid, 0.0)
            passes = tl.load(passes_at)
            passes_at += C * N * 4

            recalled = _product(k, k_low, state, none, TERMS)
            wanted = v.to(tl.float32) - knows[:, None] * recalled
            stored = _product(inverse, inverse_low, wanted, none, MATRIX_TERMS)
            out = reads[:, None] * _product(q, q_low, state, none, TERMS)
            out = _product(weights, weights_low, stored, out, MATRIX_TERMS)
            stored *= stores[:, None]
            state = _product(tl.trans(k), tl.trans(k_low), stored, state * passes, TERMS)
            out_at = out_ptr + (at[:, None] * N + head) * V + column[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), there)
        if states is not None:
            tl.store(state_at, state, inside)


def _launch_systems(rows: DeltaRows, out: Tensor, most: int, terms: int) -> Systems:
    """The systems of each chunk, with row t of its matrices. Zeros rows of no sequence in `out`."""
    num_rows, heads, _ = out.shape
    num_sequences = rows.seq_lens.shape[0]
    tiles = num_rows // CHUNK + num_sequences + 1
    shape = (1, num_rows, heads, CHUNK) if terms == 1 else (2, num_rows, heads, CHUNK)
    stored = torch.float32 if terms == 1 else torch.bfloat16
    inverse, weights = (out.new_empty(shape, dtype=stored) for _ in range(2))
    factors = out.new_empty((num_rows, heads, 4), dtype=torch.float32)
    systems = Systems(inverse, weights, factors, inverse.stride(0))
    _systems[(tiles, heads)](
        *rows.indexed(),
        out,
        systems,
        num_rows,
        num_sequences,
        **rows.sizes(),
        MOST=most,
        TERMS=terms,
        num_warps=4,
        **overlap(out.device),
    )
    return systems


def launch_chunks(rows: DeltaRows, out: Tensor, most: int, tile: Launch) -> None:
    """Fill `out` and replace the states of sequences with more than `most` new tokens; zeros for
    rows of no sequence. rows: flat
    """
    _, heads, width = rows.v.shape
    terms = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}[rows.k.dtype]
    systems = _launch_systems(rows, out, most, terms)
    block = max(LEAST_COLUMNS, min(tile["BLOCK_V"], triton.next_power_of_2(width)))
    _walk[(triton.cdiv(width, block), heads, rows.seq_lens.shape[0])](
        *rows.indexed(),
        out,
        systems,
        **rows.sizes(),
        BLOCK_V=block,
        MOST=most,
        TERMS=terms,
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
        **overlap(out.device),
    )
