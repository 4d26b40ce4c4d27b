"""Causal depthwise convolution in Triton, over the sequences of a step and their states, or without
state.

A program computes some channels of a tile of consecutive tokens of one sequence. Inputs before the
step are in the sequence's slot. The program of a sequence's first tile is the only one that reads
them, so it is also the one that replaces them.

T rows, C channels, S sequences. The host decides by shapes only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import first_refusal, named, strided, unknown
from atomc.kernels.triton.attention.sequences import tokens_of
from atomc.kernels.triton.launch.launch import begin, indexed, overlap, unfit
from atomc.kernels.triton.launch.tiles import CONV
from atomc.ops.conv import ACTIVATIONS
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _convolve(
    x,
    weight,
    bias_ptr,
    state,
    out_ptr,
    query_start,
    seq_lens,
    state_slots,
    num_rows,
    num_sequences,
    C: constexpr,
    TAPS: constexpr,
    BLOCK_C: constexpr,
    BLOCK_T: constexpr,
    BY_SEQUENCE: constexpr,
    SILU: constexpr,
    PDL: constexpr,
):
    """One tile, or with BY_SEQUENCE all tiles of a sequence."""
    begin(PDL)
    s, start, end, length, first_tile, end_tile = tokens_of(
        tl.program_id(0), query_start, seq_lens, num_rows, num_sequences, BLOCK_T, BY_SEQUENCE
    )
    num_new = end - start
    real = s < num_sequences
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channel < C)[None, :]
    x_at = x.ptr + (start.to(tl.int64) * x.s0 + channel[None, :])
    remembers = real & (length > num_new)
    if state is not None:
        slot = tl.load(state_slots + s, mask=real, other=0).to(tl.int64)
        state_at = state.ptr + (slot * state.s0 + channel[None, :])
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
    for first in range(first_tile, end_tile, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)[:, None]
        there = (token < num_new) & inside
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for tap in tl.static_range(TAPS):
            at = token - (TAPS - 1 - tap)
            value = tl.load(x_at + at.to(tl.int64) * x.s0, there & (at >= 0), 0.0).to(tl.float32)
            if state is not None:  # noqa: SIM102  only one of them is known to the compiler
                if first < TAPS - 1:
                    kept = there & (at < 0) & remembers
                    old = tl.load(state_at + (TAPS - 1 + at) * state.s1, kept, 0.0)
                    value += old.to(tl.float32)
            factor = tl.load(weight.ptr + channel * weight.s0 + tap * weight.s1, channel < C, 0.0)
            total += value * factor.to(tl.float32)[None, :]
        if bias_ptr is not None:
            total += bias[None, :]
        if SILU:
            total *= tl.sigmoid(total)
        total = tl.where(real, total, 0.0)
        out_at = out_ptr + (start + token).to(tl.int64) * C + channel[None, :]
        tl.store(out_at, total.to(out_ptr.dtype.element_ty), there)

    if state is not None:  # noqa: SIM102  only one of them is known to the compiler
        if (first_tile == 0) & real & (num_new > 0):
            row = tl.arange(0, triton.next_power_of_2(TAPS))[:, None]
            moved = (row < TAPS - 1) & inside
            at = num_new - (TAPS - 1) + row
            new = tl.load(x_at + at.to(tl.int64) * x.s0, moved & (at >= 0), 0.0).to(tl.float32)
            kept = moved & (at < 0) & remembers
            new += tl.load(state_at + (TAPS - 1 + at) * state.s1, kept, 0.0).to(tl.float32)
            # All threads have read the old inputs.
            tl.debug_barrier()
            tl.store(state_at + row * state.s1, new.to(state.ptr.dtype.element_ty), moved)


def refuse_causal_conv1d(
    platform: Platform, x: Tensor, bias: Tensor | None, activation: str
) -> Refusal | None:
    if reason := unfit(platform, x=x, bias=bias) or unknown(ACTIVATIONS, activation=activation):
        return reason
    if x.dim() < 2:
        return Refusal("shape", "x has 1 dimension: written for rows of channels")
    return None


def refuse_step(query_start: Tensor, seq_lens: Tensor, state_slots: Tensor) -> Refusal | None:
    """Refuse descriptions of sequences that the kernels of state per sequence cannot read."""
    expected = (
        ("query_start", query_start, torch.int32),
        ("seq_lens", seq_lens, torch.int32),
        ("state_slots", state_slots, torch.int64),
    )
    for name, numbers, dtype in expected:
        if numbers.dtype != dtype or not known_equal(numbers.stride(-1), 1):
            return Refusal("dtype", f"{name} is not a contiguous {dtype} tensor")
    return None


refuse_causal_conv1d_update = first_refusal(
    refuse_causal_conv1d, named("conv_state", strided), refuse_step
)


def equal_sequences(count: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """query_start and seq_lens of so many sequences that begin, of equal length."""
    starts = torch.arange(0, (count + 1) * tokens, max(tokens, 1), dtype=torch.int32, device=device)
    return starts, torch.full((count,), tokens, dtype=torch.int32, device=device)


@ops.causal_conv1d.kernel("triton", refuses=refuse_causal_conv1d, tuned_for=CONV.archs)
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if not x.numel():
        return x.new_empty(x.shape)
    tokens = x.shape[-2]
    starts, lengths = equal_sequences(x.numel() // (tokens * x.shape[-1]), tokens, x.device)
    return _launch(x, weight, bias, None, starts, lengths, None, activation)


@ops.causal_conv1d_update.kernel(
    "triton", refuses=refuse_causal_conv1d_update, tuned_for=CONV.archs
)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    activation: str,
) -> Tensor:
    return _launch(x, weight, bias, conv_state, query_start, seq_lens, state_slots, activation)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor | None,
    activation: str,
) -> Tensor:
    channels, taps = weight.shape
    rows = x.reshape(-1, channels)
    out = rows.new_empty(rows.shape)
    num_rows, num_sequences = rows.shape[0], seq_lens.shape[0]
    by_sequence = num_rows <= num_sequences
    tile = CONV.choose(x.device, 1 if by_sequence else num_rows // num_sequences)
    block_t = 1 if by_sequence else max(tile["BLOCK_T"], triton.next_power_of_2(taps))
    tiles = num_sequences + 1 + (0 if by_sequence else num_rows // block_t)
    if num_rows:
        _convolve[(tiles, triton.cdiv(channels, tile["BLOCK_C"]))](
            *map(indexed, (rows, weight)),
            bias,
            indexed(state),
            out,
            query_start,
            seq_lens,
            state_slots,
            num_rows,
            num_sequences,
            C=channels,
            TAPS=taps,
            BLOCK_C=tile["BLOCK_C"],
            BLOCK_T=block_t,
            BY_SEQUENCE=by_sequence,
            SILU=activation == "silu",
            num_warps=tile["num_warps"],
            **overlap(x.device),
        )
    return out.view(x.shape)
