"""Causal depthwise convolution over the tokens of a sequence, with the last inputs as state (Mamba,
gated delta nets, short convolutions).

T tokens, C channels, K kernel size, S sequences.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_shapes import shape_of_x
from atomc.ops.op_traits import Arguments, Kind
from atomc.ops.state import StateSpec, rows_of, state_before, state_handle
from atomc.ops.state_update import replacing_state, updated_by

ACTIVATIONS = ("silu", "none")


def conv_state(channels: int, kernel_size: int) -> nn.Buffer:
    """The handle of a layer's last inputs, for `ops.causal_conv1d`: `self.conv_state =
    ops.conv_state(...)`.

    Raises ValueError for a kernel size of less than 2, which keeps no inputs.
    """
    if kernel_size < 2:
        raise ValueError(f"conv_state: kernel_size is {kernel_size}, expected at least 2")
    return state_handle(kernel_size - 1, channels)


def activated(total: Tensor, activation: str) -> Tensor:
    """The activation by its name.

    Raises ValueError for another name than those of ACTIVATIONS.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"causal_conv1d: activation {activation!r} is not one of {ACTIVATIONS}")
    return F.silu(total) if activation == "silu" else total


def _work(call: OpCall) -> Work:
    x, weight, bias = call["x"], call["weight"], call.arguments["bias"]
    operands = [x, weight, *([] if bias is None else [bias]), *call.results]
    return bytes_of(operands), 2 * x.numel * weight.shape[-1]


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=replacing_state(_work),
    mutates=("conv_state",),
    rounds_once=lambda _: True,
    shape=shape_of_x,
)
def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    *,
    activation: str,
) -> Tensor:
    """causal_conv1d of ragged sequences. x [..., C] (T rows) -> [..., C]; rows of no sequence are
    zero.

    conv_state [slots, K - 1, C] has the last inputs of sequence s before the step, the oldest
    first, in row state_slots[s]; they are replaced by the last inputs after the step. query_start
    and seq_lens as in paged_attention. The slot of a sequence without new tokens is not written.
    """
    rows, taps = x.reshape(-1, x.shape[-1]).to(torch.float32), weight.shape[-1]
    before = state_before(conv_state, query_start, seq_lens, state_slots).to(torch.float32)
    row, owner, real = rows_of(query_start, rows.shape[0])
    ago = row - query_start[owner]  # the number of new tokens before this one
    total = rows.new_zeros(rows.shape)
    for tap in range(taps):
        back = taps - 1 - tap
        earlier = before[owner, (ago + tap).clamp(max=taps - 2)]
        found = torch.where((ago >= back)[:, None], rows[(row - back).clamp(min=0)], earlier)
        total = total + found * weight[:, tap].to(torch.float32)
    if bias is not None:
        total = total + bias.to(torch.float32)

    # The inputs before the step and the new ones are one sequence, whose last ones stay.
    new = query_start.diff()
    at = new[:, None] - (taps - 1) + torch.arange(taps - 1, device=x.device)
    start = query_start[:-1, None]
    inputs = x.reshape(-1, x.shape[-1])[(start + at).clamp(min=0, max=max(len(rows) - 1, 0))]
    kept = before.to(conv_state.dtype).gather(
        1, (taps - 1 + at).clamp(max=taps - 2)[..., None].expand_as(before).long()
    )
    after = torch.where((at >= 0)[..., None], inputs.to(conv_state.dtype), kept)
    moved = (new > 0)[:, None, None]
    conv_state[state_slots] = torch.where(moved, after, conv_state[state_slots])
    out = activated(total, activation).masked_fill(~real[:, None], 0)
    return out.to(x.dtype).view(x.shape)


def _spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    """In the dtype of x: fp8 is for state per token."""
    channels, taps = arguments["weight"].shape
    if taps < 2:
        raise ValueError(f"a convolution over {taps} token keeps no inputs; leave out its handle")
    return StateSpec.of(name, "conv", ((taps - 1, channels),), arguments["x"].dtype)


@op(
    kind=Kind.OTHER,
    rows=None,
    cost=_work,
    rounds_once=lambda _: True,
    shape=shape_of_x,
    state=updated_by(
        causal_conv1d_update, lambda arguments: math.prod(arguments["x"].shape[:-1]), _spec
    ),
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """activation(bias + sum_j weight[:, j] x[t - (K - 1) + j]), where x is zero before the first
    token. Computed in fp32, rounded once to x.dtype.

    x           [..., T, C] -> [..., T, C]
    weight      [C, K], of each channel by itself
    bias        [C] or None
    state       the layer's state handle (conv_state), which only the runtime uses
    activation  "silu" or "none"
    """
    taps, tokens = weight.shape[-1], x.shape[-2]
    padded = F.pad(x.to(torch.float32), (0, 0, taps - 1, 0))
    total = padded.new_zeros(x.shape)
    for tap in range(taps):
        shifted = padded.narrow(-2, tap, tokens)
        total = total + shifted * weight[:, tap].to(torch.float32)
    if bias is not None:
        total = total + bias.to(torch.float32)
    return activated(total, activation).to(x.dtype)
