"""Causal convolutions as torch calls, on any device: a sum of shifted rows.

T tokens, C channels, K kernel size, G sequences.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.kernels.row_views import as_rows
from atomc.ops.conv import activated
from atomc.ops.op import PreferInductor
from atomc.ops.state import state_before


def _convolved(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """inputs [..., K - 1 + T, C], with those before the first token -> [..., T, C], both in fp32.

    Not F.conv1d, which wants channels before tokens. Zen 4, 1,024 tokens of 2,048 channels, one
    thread: 8.5 ms, 32 with it; 14.6 where the taps of a channel are neighbours.
    """
    by_tap = weight.to(torch.float32).T.contiguous()
    tokens = inputs.shape[-2] - (len(by_tap) - 1)
    total = inputs.narrow(-2, 0, tokens) * by_tap[0]
    for tap in range(1, len(by_tap)):
        total.addcmul_(inputs.narrow(-2, tap, tokens), by_tap[tap])
    if bias is not None:
        total += bias.to(torch.float32)
    return activated(total, activation)


@ops.causal_conv1d.kernel("torch", prefer_inductor=PreferInductor.ALWAYS)
def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    inputs = F.pad(x.to(torch.float32), (0, 0, weight.shape[-1] - 1, 0))
    return _convolved(inputs, weight, bias, activation).to(x.dtype)


@ops.causal_conv1d_update.kernel("torch", syncs=True)
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
    rows, num_kept = as_rows(x), weight.shape[-1] - 1
    out = rows.new_zeros(rows.shape)
    before = state_before(conv_state, query_start, seq_lens, state_slots)
    for count, members, starts in _sequences_by_length(query_start):
        new = (starts[:, None] + torch.arange(count, device=x.device)).flatten()
        new_rows = rows.index_select(0, new).view(-1, count, rows.shape[-1])
        inputs = torch.cat((before[members].to(rows.dtype), new_rows), 1)
        total = _convolved(inputs.to(torch.float32), weight, bias, activation)
        out.index_copy_(0, new, total.to(out.dtype).flatten(0, 1))
        last = inputs[:, -num_kept:].to(conv_state.dtype)
        conv_state.index_copy_(0, state_slots[members], last)
    return out.view(x.shape)


def _sequences_by_length(query_start: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(number of new tokens, the sequences with this number, their first rows), without 0."""
    bounds, sequences = query_start.tolist(), dict[int, list[int]]()
    for s, (start, end) in enumerate(pairwise(bounds)):
        if start < end:
            sequences.setdefault(end - start, []).append(s)
    for count, members in sequences.items():
        these = torch.tensor(members, device=query_start.device)
        yield count, these, query_start[these]
