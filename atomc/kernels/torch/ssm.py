"""The scan of Mamba-2 in chunks of tokens, by torch calls, on any device (Dao and Gu 2024, section
6: the state space dual form).

Within a chunk a result is a sum over its tokens, weighted by B, C and the decay between two tokens;
before it is the state, which one chunk hands to the next.

T tokens, L of a chunk, N heads, P width of a head, G groups, S width of the state.
"""

from itertools import pairwise

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.row_views import as_heads
from atomc.ops.ssm import repeat_groups, time_steps
from atomc.ops.state import state_before

CHUNK = 64  # not measured


def chunked_scan(
    a: Tensor, state: Tensor, x: Tensor, steps: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """The results [..., T, N, P] of a scan from `state`, and the state after it. In fp32: a
    [N], state [..., N, P, S], x [..., T, N, P], steps [..., T, N], b and c [..., T, N, S].
    """
    if not x.shape[-3]:
        return x, state
    chunks = [torch.split(part, CHUNK, -3) for part in (x * steps.unsqueeze(-1), b, c)]
    outs = []
    for inputs, keys, queries, decay in zip(
        *chunks, torch.split(a * steps, CHUNK, -2), strict=True
    ):
        u, k, q = (part.transpose(-3, -2) for part in (inputs, keys, queries))  # [..., N, L, ...]
        # Logarithms of decays since the chunk began, and between two tokens: as the difference of
        # two of the first, a small one would lose its digits.
        logs = decay.transpose(-2, -1).unsqueeze(-1)
        total = logs.cumsum(-2)
        between = logs.expand(*logs.shape[:-1], logs.shape[-2]).tril(-1).cumsum(-2)
        weights = (q @ k.transpose(-2, -1)) * between.exp().tril()
        outs.append((weights @ u + (q @ state.transpose(-2, -1)) * total.exp()).transpose(-3, -2))
        left = between[..., -1, :].exp().unsqueeze(-1)
        state = state * total[..., -1:, :].exp() + (u * left).transpose(-2, -1) @ k
    return torch.cat(outs, -3), state


@ops.ssm_scan.kernel("torch")
def ssm_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float | None,
) -> Tensor:
    heads, rows = x.shape[-2], x.to(torch.float32)
    steps = time_steps(dt, dt_bias, dt_min, dt_max)
    b, c = repeat_groups(b, heads), repeat_groups(c, heads)
    before = rows.new_zeros((*x.shape[:-3], *x.shape[-2:], b.shape[-1]))
    out, _ = chunked_scan(-torch.exp(a_log.to(torch.float32)), before, rows, steps, b, c)
    return (out + d.to(torch.float32)[:, None] * rows).to(x.dtype)


@ops.ssm_scan_update.kernel("torch", syncs=True)
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
    heads = x.shape[-2]
    rows = as_heads(x).to(torch.float32)
    steps = time_steps(dt.reshape(-1, heads), dt_bias, dt_min, dt_max)
    a = -torch.exp(a_log.to(torch.float32))
    b, c = (repeat_groups(as_heads(part), heads) for part in (b, c))
    before = state_before(recurrent_state, query_start, seq_lens, state_slots)
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    skip, spans = d.to(torch.float32)[:, None], list(pairwise(query_start.tolist()))
    ones = [s for s, (start, end) in enumerate(spans) if end - start == 1]
    if ones:  # all at once, as in a decode step
        at = torch.tensor([spans[s][0] for s in ones], device=x.device)
        which = torch.tensor(ones, device=x.device)
        new = [part[at].unsqueeze(1) for part in (rows, steps, b, c)]
        result, after = chunked_scan(a, before[which], *new)
        out[at] = (result + skip * new[0]).squeeze(1)
        recurrent_state[state_slots[which]] = after
    for s, (start, end) in enumerate(spans):
        if end - start > 1:
            new = [part[start:end] for part in (rows, steps, b, c)]
            result, after = chunked_scan(a, before[s], *new)
            out[start:end] = result + skip * new[0]
            recurrent_state[state_slots[s]] = after
    return out.to(x.dtype).view(x.shape)
