"""The gated delta rule in Triton, over the sequences of a step and their states, or without state.

Sequences of few new tokens are computed token by token: a program has some columns of the state of
one head in registers, which it reads and writes once. Longer ones are computed in chunks of 64
tokens (delta_chunks.py). A step with both launches both kernels; each leaves the other's sequences
out on the device, so that the host decides by shapes only and a step can be captured in a CUDA
graph.

T rows, H key heads, N value heads, K key width, V value width, S sequences.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import first_refusal, named, strided, too_wide
from atomc.kernels.triton.launch.launch import begin, item, overlap, unfit
from atomc.kernels.triton.launch.tile_table import Launch
from atomc.kernels.triton.launch.tiles import DELTA_CHUNKS, DELTA_STEP
from atomc.kernels.triton.recurrent.conv import equal_sequences, refuse_step
from atomc.kernels.triton.recurrent.delta_chunks import (
    MAX_WIDTH,
    DeltaRows,
    delta_step,
    launch_chunks,
)
from atomc.ops.op import Refusal
from atomc.platform import Platform

# A sequence of at most so many new tokens does not fill a chunk. Not measured.
STEPS = 8


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _steps(
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
    num_rows,
    num_sequences,
    N: constexpr,
    GROUP: constexpr,
    K: constexpr,
    V: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
    MOST: constexpr,
    PDL: constexpr,
):
    """All new tokens of a sequence, if there are at most MOST; 0: of any sequence, and zeros for
    the rows after the last one.
    """
    begin(PDL)
    v_first = tl.program_id(0) * BLOCK_V
    head = tl.program_id(1)
    s = tl.program_id(2)
    real = s < num_sequences
    start = tl.load(query_start + s)
    end = tl.load(query_start + s + 1, mask=real, other=num_rows)
    num_new = end - start
    if MOST > 0:
        num_new = tl.where(num_new <= MOST, num_new, 0)
    if num_new > 0:
        key = tl.arange(0, BLOCK_K)
        column = v_first + tl.arange(0, BLOCK_V)
        inside = (key < K)[:, None] & (column < V)[None, :]
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        state_at = key[:, None] * V + column[None, :]
        if states is not None:
            length = tl.load(seq_lens + s, mask=real, other=0)
            slot = tl.load(state_slots + s, mask=real, other=0).to(tl.int64)
            state_at = states.ptr + slot * states.s0 + head * (K * V) + state_at
            state = tl.load(state_at, inside & real & (length > num_new), 0.0)
        for token in range(num_new):
            row = (start + token).to(tl.int64)
            k = tl.load(item(k_rows, row, head // GROUP) + key, key < K, 0.0)
            q = tl.load(item(q_rows, row, head // GROUP) + key, key < K, 0.0)
            v = tl.load(item(v_rows, row, head) + column, column < V, 0.0)
            decay = tl.load(item(g_rows, row, head)).to(tl.float32)
            beta = tl.load(item(beta_rows, row, head)).to(tl.float32)
            k, q, v = k.to(tl.float32), q.to(tl.float32), v.to(tl.float32)
            state, out = delta_step(state, q, k, v, decay, beta, scale)
            out = tl.where(real, out, 0.0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (row * N + head) * V + column, out, column < V)
        if states is not None:
            tl.store(state_at, state, inside & real)


def refuse_gated_delta_rule(
    platform: Platform, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> Refusal | None:
    if reason := unfit(platform, q=q, k=k, v=v, g=g, beta=beta):
        return reason
    if q.dtype != k.dtype or not all(isinstance(x.shape[-2], int) for x in (k, v)):
        return Refusal("dtype", f"q is {q.dtype} and k {k.dtype}, or a number of heads is dynamic")
    if any(not known_equal(x.stride(-2), x.shape[-1]) and x.shape[-2] > 1 for x in (q, k, v)):
        return Refusal("layout", "the heads of a token are not neighbours in memory")
    return too_wide(max(k.shape[-1], v.shape[-1]), MAX_WIDTH, "heads")


refuse_gated_delta_rule_update = first_refusal(
    refuse_gated_delta_rule, named("recurrent_state", strided), refuse_step
)


@ops.gated_delta_rule.kernel(
    "triton", refuses=refuse_gated_delta_rule, tuned_for=DELTA_CHUNKS.archs
)
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> Tensor:
    if not v.numel():
        return v.new_empty(v.shape)
    tokens = v.shape[-3]
    starts, lengths = equal_sequences(v[..., 0, 0].numel() // tokens, tokens, v.device)
    arguments = DeltaRows(q, k, v, g, beta, None, starts, lengths, None, scale)
    return _all_rows(arguments, by_steps=tokens <= STEPS, by_chunks=tokens > STEPS)


@ops.gated_delta_rule_update.kernel(
    "triton", refuses=refuse_gated_delta_rule_update, tuned_for=DELTA_STEP.archs
)
def gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    scale: float,
) -> Tensor:
    if not v.numel():
        return v.new_empty(v.shape)
    # As many rows as sequences: each has one token, or is padding.
    prompts = v[..., 0, 0].numel() > seq_lens.shape[0]
    step = query_start, seq_lens, state_slots
    arguments = DeltaRows(q, k, v, g, beta, recurrent_state, *step, scale)
    # A step of one sequence has no others beside its prompt.
    alone = prompts and seq_lens.shape[0] == 1 and v[..., 0, 0].numel() > STEPS
    return _all_rows(arguments, by_steps=not alone, by_chunks=prompts)


def _all_rows(given: DeltaRows, by_steps: bool, by_chunks: bool) -> Tensor:
    """The result of the kernels that these sequences may need."""
    rows = given.flat()
    out = rows.v.new_empty(rows.v.shape)
    most = STEPS if by_steps and by_chunks else 0
    heads = rows.v.shape[1] * rows.seq_lens.shape[0]
    if by_chunks:
        launch_chunks(rows, out, most, DELTA_CHUNKS.choose(out.device, heads))
    if by_steps:
        launch_steps(rows, out, most, DELTA_STEP.choose(out.device, heads))
    return out.view(given.v.shape)


def launch_steps(rows: DeltaRows, out: Tensor, most: int, tile: Launch) -> None:
    """Fill `out` and replace the states of sequences with at most `most` new tokens; 0: of all, and
    zeros for rows of no sequence. rows: flat
    """
    num_rows, heads, width = rows.v.shape
    num_sequences = rows.seq_lens.shape[0]
    block = min(tile["BLOCK_V"], triton.next_power_of_2(width))
    _steps[(triton.cdiv(width, block), heads, num_sequences + (0 if most else 1))](
        *rows.indexed(),
        out,
        num_rows,
        num_sequences,
        **rows.sizes(),
        BLOCK_V=block,
        MOST=most,
        num_warps=tile["num_warps"],
        **overlap(out.device),
    )
