"""A step of decoding of a gated delta net in Triton: convolution, gates and the delta rule in one
program per sequence, value head and block of its columns. Steps of many heads, and those with
prompts, run them one by one.

The convolved queries and keys of a key head are computed by each program that reads them. Its
inputs are replaced once, by the last of these programs to have read them: they count. Columns of
the values belong to one program, which replaces their inputs itself.

T rows, C channels, H key heads, N value heads, K key width, V value width, S sequences.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, named, strided, too_wide
from atomc.kernels.triton.launch.launch import begin, dot_size, indexed, item, overlap
from atomc.kernels.triton.launch.tile_table import Launch
from atomc.kernels.triton.launch.tiles import DELTA_DECODE
from atomc.kernels.triton.recurrent.conv import causal_conv1d_update, refuse_causal_conv1d_update
from atomc.kernels.triton.recurrent.delta_chunks import MAX_WIDTH, delta_step
from atomc.kernels.triton.recurrent.delta_gates import (
    decay_of,
    delta_gates,
    rate_of,
    refuse_delta_gates,
)
from atomc.kernels.triton.recurrent.delta_rule import gated_delta_rule_update
from atomc.ops.conv_delta_rule import split_channels
from atomc.ops.op import Shared

# Of all sequences. H200, us, in one / one by one without the gates, 32 heads of 128: 1 sequence 5.4
# / 5.6, 8 sequences 15.4 / 13.7, 64 sequences 103.6 / 77.8. (`DELTA_DECODE.command`)
MOST_HEADS = 256


class Conv(NamedTuple):
    """The convolution as one argument of a kernel, and the strides of its weight [C, taps] and its
    state [slots, taps - 1, C].
    """

    bias: Tensor | None
    weight: Tensor
    state: Tensor
    channel: int
    tap: int
    slot: int
    row: int


@triton.jit
def _convolved(
    conv,
    x_at,
    state_at,
    channel,
    inside,
    remembers,
    TAPS: constexpr,
    SILU: constexpr,
):
    """The convolution of one row in these channels, rounded as the reference rounds it, in fp32.
    x_at, state_at: of channel 0.
    """
    x = tl.load(x_at + channel, inside, 0.0)
    total = tl.zeros(channel.shape, tl.float32)
    weight_at = conv.weight + channel * conv.channel
    for tap in tl.static_range(TAPS - 1):
        earlier = tl.load(state_at + tap * conv.row + channel, inside & remembers, 0.0)
        weight = tl.load(weight_at + tap * conv.tap, inside, 0.0)
        total += earlier.to(tl.float32) * weight.to(tl.float32)
    weight = tl.load(weight_at + (TAPS - 1) * conv.tap, inside, 0.0)
    total += x.to(tl.float32) * weight.to(tl.float32)
    if conv.bias is not None:
        total += tl.load(conv.bias + channel, inside, 0.0).to(tl.float32)
    if SILU:
        total *= tl.sigmoid(total)
    return total.to(x.dtype).to(tl.float32)


@triton.jit
def _replace_inputs(conv, x_at, state_at, channel, inside, remembers, TAPS: constexpr):
    """Move the inputs of these channels by one row, the last of which is that of x. No other
    program reads them any more.
    """
    row, step = tl.arange(0, triton.next_power_of_2(TAPS - 1))[:, None], conv.row
    at, inside = state_at + row * step + channel[None, :], inside[None, :]
    remembered = tl.load(at + step, inside & remembers & (row < TAPS - 2), 0.0)
    x = tl.load(x_at + channel[None, :] + row * 0, inside & (row == TAPS - 2), 0.0)
    new = tl.where(row < TAPS - 2, remembered, x.to(remembered.dtype))
    # All threads have read the old inputs.
    tl.debug_barrier()
    tl.store(at, new, inside & (row < TAPS - 1))


@triton.jit
def _decode(
    x,
    conv,
    a,
    b,
    A_log_ptr,
    dt_bias_ptr,
    state,
    out_ptr,
    query_start,
    seq_lens,
    state_slots,
    arrived_ptr,
    scale,
    N: constexpr,
    GROUP: constexpr,
    K: constexpr,
    V: constexpr,
    TAPS: constexpr,
    SILU: constexpr,
    RATE_SCALE: constexpr,
    BLOCK_K: constexpr,
    BLOCK_V: constexpr,
    PDL: constexpr,
):
    """Row s is the new token of sequence s, or both are padding."""
    begin(PDL)
    s, head = tl.program_id(2), tl.program_id(1)
    key_head = head // GROUP
    column = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    start = tl.load(query_start + s)
    num_new = tl.load(query_start + s + 1) - start
    out_at = out_ptr + (s.to(tl.int64) * N + head) * V + column
    if num_new == 0:
        tl.store(out_at, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), column < V)
    else:
        remembers = tl.load(seq_lens + s) > 1
        slot = tl.load(state_slots + s).to(tl.int64)
        key = tl.arange(0, BLOCK_K)
        inside = (key < K)[:, None] & (column < V)[None, :]
        state_at = key[:, None] * V + column[None, :]
        state_at = state.ptr + slot * state.s0 + head * (K * V) + state_at
        old = tl.load(state_at, inside & remembers, 0.0)

        row = start.to(tl.int64)
        x_at = x.ptr + row * x.s0
        conv_at = conv.state + slot * conv.slot
        q_channel = key_head * K + key
        k_channel = (N // GROUP + key_head) * K + key
        v_channel = 2 * (N // GROUP) * K + head * V + column
        q = _convolved(conv, x_at, conv_at, q_channel, key < K, remembers, TAPS, SILU)
        k = _convolved(conv, x_at, conv_at, k_channel, key < K, remembers, TAPS, SILU)
        v = _convolved(conv, x_at, conv_at, v_channel, column < V, remembers, TAPS, SILU)
        # All threads have read the inputs; then the program says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + s * (N // GROUP) + key_head, 1, sem="acq_rel")

        A_log = tl.load(A_log_ptr + head).to(tl.float32)
        dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
        decay = decay_of(tl.load(item(a, row, head)).to(tl.float32), A_log, dt_bias)
        beta = rate_of(tl.load(item(b, row, head)), RATE_SCALE)
        new, out = delta_step(old, q, k, v, decay, beta, scale)
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), column < V)
        tl.store(state_at, new, inside)

        _replace_inputs(conv, x_at, conv_at, v_channel, column < V, remembers, TAPS)
        if arrived == GROUP * tl.num_programs(0) - 1:
            _replace_inputs(conv, x_at, conv_at, q_channel, key < K, remembers, TAPS)
            _replace_inputs(conv, x_at, conv_at, k_channel, key < K, remembers, TAPS)
            # For the next layer.
            tl.store(arrived_ptr + s * (N // GROUP) + key_head, 0)


def arrivals(seq_lens: Tensor, key_heads: int) -> tuple[Tensor, ...]:
    """(zeros [S, H],): how many programs have read the inputs of a key head. Zeros again after each
    call, so that all layers count in them.
    """
    return (torch.zeros(len(seq_lens), key_heads, dtype=torch.int32, device=seq_lens.device),)


def _key_heads(x: Tensor, recurrent_state: Tensor) -> tuple[int]:
    heads, key_width, width = recurrent_state.shape[1:]
    return ((x.shape[-1] - heads * width) // (2 * key_width),)


refuse_conv_gated_delta_rule_update = first_refusal(
    refuse_causal_conv1d_update,
    refuse_delta_gates,
    named("recurrent_state", strided),
    lambda recurrent_state: too_wide(max(recurrent_state.shape[-2:]), MAX_WIDTH, "heads"),
)


@ops.conv_gated_delta_rule_update.kernel(
    "triton",
    refuses=refuse_conv_gated_delta_rule_update,
    shared=Shared(arrivals, ("seq_lens",), _key_heads),
    tuned_for=DELTA_DECODE.archs,
)
def conv_gated_delta_rule_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    activation: str,
    scale: float,
    rate_scale: float,
    shared: tuple[Tensor, ...],
) -> Tensor:
    step = query_start, seq_lens, state_slots
    rows = x.reshape(-1, x.shape[-1])
    heads, _, width = recurrent_state.shape[1:]
    # As many rows as sequences: each has one token, or is padding.
    if len(rows) == len(seq_lens) and heads * len(rows) <= MOST_HEADS:
        out = x.new_empty((*x.shape[:-1], heads, width))
        if len(rows):
            launch_decode(
                rows,
                weight,
                bias,
                conv_state,
                a.reshape(-1, heads),
                b.reshape(-1, heads),
                A_log,
                dt_bias,
                recurrent_state,
                *step,
                activation=activation,
                scale=scale,
                rate_scale=rate_scale,
                out=out,
                arrived=shared[0],
                tile=DELTA_DECODE.choose(x.device, heads * len(rows)),
            )
        return out
    convolved = causal_conv1d_update(x, weight, bias, conv_state, *step, activation=activation)
    g, beta = delta_gates(a, b, A_log, dt_bias, rate_scale)
    q, k, v = split_channels(convolved, recurrent_state)
    return gated_delta_rule_update(q, k, v, g, beta, recurrent_state, *step, scale=scale)


def launch_decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    *,
    activation: str,
    scale: float,
    rate_scale: float = 1.0,
    out: Tensor,
    arrived: Tensor,
    tile: Launch,
) -> None:
    """Fill `out` and replace both states; x [S, C], a and b [S, N] have a row per sequence."""
    heads, key_width, width = recurrent_state.shape[1:]
    block = min(tile["BLOCK_V"], triton.next_power_of_2(width))
    _decode[(triton.cdiv(width, block), heads, len(x))](
        indexed(x),
        Conv(bias, weight, conv_state, *weight.stride(), *conv_state.stride()[:2]),
        *map(indexed, (a, b)),
        A_log,
        dt_bias,
        indexed(recurrent_state),
        out,
        query_start,
        seq_lens,
        state_slots,
        arrived,
        scale,
        N=heads,
        GROUP=heads // arrived.shape[1],
        K=key_width,
        V=width,
        TAPS=weight.shape[1],
        SILU=activation == "silu",
        RATE_SCALE=rate_scale,
        BLOCK_K=dot_size(key_width),
        BLOCK_V=block,
        num_warps=tile["num_warps"],
        **overlap(x.device),
    )
