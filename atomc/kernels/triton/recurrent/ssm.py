"""The scan of Mamba-2 in Triton: a program has the state of some columns of one head of one
sequence in registers.

Sequences with few new tokens walk over them. Those with many take chunks, in which a result is a
sum over the tokens of the chunk, weighted by B, C and the decay between two tokens, plus what the
state before the chunk adds (Dao and Gu 2024, section 6). The host decides by shapes only: a step
with prompts launches both kernels, and each leaves the sequences of the other alone.

T rows, N heads, P width of a head, G groups, S width of the state, L tokens of a chunk.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, gapped, named, no_bf16_products, too_wide, unlike
from atomc.kernels.triton.launch.launch import begin, dot_size, indexed, item, overlap, unfit
from atomc.kernels.triton.rows.activation import softplus
from atomc.ops.formats import FLOATS

MAX_STATE = 256
# Not measured: rows of a sequence that are walked, numbers of the state in a program that walks,
# tokens of a chunk, columns of a program that takes chunks.
FEW, WALKED, CHUNK, COLUMNS = 8, 4096, 64, 64


class Scan(NamedTuple):
    """The contiguous operands of the op, and its result, as one argument of a kernel."""

    a_log: Tensor
    d: Tensor
    bias: Tensor
    state: Tensor
    out: Tensor
    query_start: Tensor
    seq_lens: Tensor
    state_slots: Tensor


@triton.jit
def _step_sizes(dt, bias, DT_MIN: constexpr, DT_MAX: constexpr):
    """softplus(dt + bias) within its limits; dt in fp32."""
    step = tl.maximum(softplus(dt + bias), DT_MIN)
    return step if DT_MAX is None else tl.minimum(step, DT_MAX)


@triton.jit
def _of_head(scan, n):
    """a, d and the bias of a head, in fp32."""
    a = -tl.exp(tl.load(scan.a_log + n).to(tl.float32))
    return a, tl.load(scan.d + n).to(tl.float32), tl.load(scan.bias + n).to(tl.float32)


@triton.jit
def _walk(
    scan,
    xs,
    dts,
    bs,
    cs,
    most,
    N: constexpr,
    P: constexpr,
    S: constexpr,
    HEADS_PER_GROUP: constexpr,
    BLOCK_P: constexpr,
    BLOCK_S: constexpr,
    DT_MIN: constexpr,
    DT_MAX: constexpr,
    ALL_ROWS: constexpr,
    PDL: constexpr,
):
    """Sequences of 1 to `most` new tokens. ALL_ROWS: also writes zeros to row s of a sequence
    without any, which is padding.
    """
    begin(PDL)
    s, n = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    j = tl.arange(0, BLOCK_S)
    start, end = tl.load(scan.query_start + s), tl.load(scan.query_start + s + 1)
    if (start < end) & (end - start <= most):
        inside = (p < P)[:, None] & (j < S)[None, :]
        slot = tl.load(scan.state_slots + s)
        at = scan.state + (slot * N + n) * (P * S) + p[:, None] * S + j[None, :]
        begins = tl.load(scan.seq_lens + s) == end - start
        state = tl.load(at, inside & (begins == 0), 0.0)  # zeros if it begins with the step
        a, d, bias = _of_head(scan, n)
        g = n // HEADS_PER_GROUP
        for t in range(start, end):
            row = tl.cast(t, tl.int64)
            dt = tl.load(item(dts, row, n)).to(tl.float32)
            step = _step_sizes(dt, bias, DT_MIN, DT_MAX)
            x = tl.load(item(xs, row, n) + p, p < P, 0.0).to(tl.float32)
            b = tl.load(item(bs, row, g) + j, j < S, 0.0).to(tl.float32)
            c = tl.load(item(cs, row, g) + j, j < S, 0.0).to(tl.float32)
            state = state * tl.exp(a * step) + (x * step)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + d * x
            tl.store(scan.out + (row * N + n) * P + p, y.to(scan.out.dtype.element_ty), p < P)
        tl.store(at, state, inside)
    elif ALL_ROWS & (start == end):
        zeros = tl.zeros([BLOCK_P], scan.out.dtype.element_ty)
        tl.store(scan.out + (s * N + n) * P + p, zeros, p < P)


@triton.jit
def _chunks(
    scan,
    xs,
    dts,
    bs,
    cs,
    few,
    N: constexpr,
    P: constexpr,
    S: constexpr,
    HEADS_PER_GROUP: constexpr,
    BLOCK_P: constexpr,
    BLOCK_S: constexpr,
    DT_MIN: constexpr,
    DT_MAX: constexpr,
    CHUNK: constexpr,
    PRECISION: constexpr,
    PDL: constexpr,
):
    """Sequences of more than `few` new tokens."""
    begin(PDL)
    s, n = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    j = tl.arange(0, BLOCK_S)
    start, end = tl.load(scan.query_start + s), tl.load(scan.query_start + s + 1)
    if end - start > few:
        inside = (p < P)[:, None] & (j < S)[None, :]
        slot = tl.load(scan.state_slots + s)
        at = scan.state + (slot * N + n) * (P * S) + p[:, None] * S + j[None, :]
        begins = tl.load(scan.seq_lens + s) == end - start
        state = tl.load(at, inside & (begins == 0), 0.0)  # zeros if it begins with the step
        a, d, bias = _of_head(scan, n)
        g = n // HEADS_PER_GROUP
        token = tl.arange(0, CHUNK)
        for first in range(start, end, CHUNK):
            there = token < end - first
            row = tl.cast(first, tl.int64) + token
            dt = tl.load(item(dts, row, n), there, 0.0).to(tl.float32)
            step = tl.where(there, _step_sizes(dt, bias, DT_MIN, DT_MAX), 0.0)
            real_x = there[:, None] & (p < P)[None, :]
            real_s = there[:, None] & (j < S)[None, :]
            x = tl.load(item(xs, row[:, None], n) + p[None, :], real_x, 0.0).to(tl.float32)
            b = tl.load(item(bs, row[:, None], g) + j[None, :], real_s, 0.0)
            c = tl.load(item(cs, row[:, None], g) + j[None, :], real_s, 0.0)
            u = x * step[:, None]
            # Logarithms of decays since the chunk began, and between two tokens: as the difference
            # of two of the first, a small one would lose its digits.
            total = tl.cumsum(a * step, 0)
            later = tl.where(token[:, None] > token[None, :], (a * step)[:, None], 0.0)
            between = tl.where(token[:, None] >= token[None, :], tl.cumsum(later, 0), -1e30)
            weights = tl.dot(c, tl.trans(b), input_precision=PRECISION) * tl.exp(between)
            b, c = b.to(tl.float32), c.to(tl.float32)
            before = tl.dot(c, tl.trans(state), input_precision=PRECISION)
            y = tl.dot(weights, u, input_precision=PRECISION) + before * tl.exp(total)[:, None]
            y += d * x
            y_at = scan.out + (row[:, None] * N + n) * P + p[None, :]
            tl.store(y_at, y.to(scan.out.dtype.element_ty), real_x)
            left = u * tl.exp(tl.sum(later, 0))[:, None]
            state = state * tl.exp(tl.sum(a * step)) + tl.dot(
                tl.trans(left), b, input_precision=PRECISION
            )
        tl.store(at, state, inside)


refuse_ssm_scan_update = first_refusal(
    named("platform x dt b c a_log d dt_bias", unfit),
    lambda platform, x: no_bf16_products(platform, x.dtype),
    named("x b c", unlike, FLOATS),
    named("recurrent_state", unlike, (torch.float32,)),
    named("query_start seq_lens", unlike, (torch.int32,)),
    lambda b: too_wide(b.shape[-1], MAX_STATE, "states"),
    named("recurrent_state query_start seq_lens state_slots", gapped),
)


@ops.ssm_scan_update.kernel("triton", refuses=refuse_ssm_scan_update)
def ssm_scan_update(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    dt_min: float,
    dt_max: float | None,
) -> Tensor:
    rows, by_head = x.reshape(-1, *x.shape[-2:]), dt.reshape(-1, dt.shape[-1])
    b, c = (part.reshape(-1, *part.shape[-2:]) for part in (b, c))
    (num_rows, heads, width), (groups, state) = rows.shape, b.shape[1:]
    sequences = seq_lens.shape[0]
    # As many rows as sequences: row s is of sequence s, or padding.
    decode = num_rows == sequences
    out = (torch.empty if decode else torch.zeros)(x.shape, dtype=x.dtype, device=x.device)
    scan = Scan(a_log, d, dt_bias, recurrent_state, out, query_start, seq_lens, state_slots)
    operands = scan, *map(indexed, (rows, by_head, b, c))
    sizes = {"N": heads, "P": width, "S": state, "HEADS_PER_GROUP": heads // groups}
    limits = {"DT_MIN": dt_min, "DT_MAX": dt_max}
    wide_s = triton.next_power_of_2(state)
    block_p = min(triton.next_power_of_2(width), max(1, WALKED // wide_s))
    _walk[(sequences, heads, triton.cdiv(width, block_p))](
        *operands,
        num_rows if decode else FEW,
        **sizes,
        **limits,
        BLOCK_P=block_p,
        BLOCK_S=wide_s,
        ALL_ROWS=decode,
        num_warps=4,
        **overlap(x.device),
    )
    if not decode:
        block_p = min(dot_size(width), COLUMNS)
        _chunks[(sequences, heads, triton.cdiv(width, block_p))](
            *operands,
            FEW,
            **sizes,
            **limits,
            BLOCK_P=block_p,
            BLOCK_S=max(16, wide_s),
            CHUNK=CHUNK,
            PRECISION="ieee" if x.dtype == torch.float32 or torch.version.hip else "tf32",
            num_warps=8,
            **overlap(x.device),
        )
    return out
