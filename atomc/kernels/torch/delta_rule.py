"""The gated delta rule as torch calls, on any device: chunks of tokens for prompts, one step for a
single token. No loop over tokens.

T tokens, H key heads, N value heads, K key width, V value width, C tokens of a chunk, M chunks, G
sequences.
"""

from itertools import pairwise

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.row_views import as_heads, as_rows
from atomc.ops.delta_rule import l2_normed, repeat_key_heads

CHUNK = 64


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> Tensor:
    """The result [..., C, N, V] of one chunk in fp32; the state [..., N, K, V] is updated (Yang et
    al. 2024, "Gated Delta Networks", section 3.3: the extended WY form).
    """
    tokens, heads = v.shape[-3:-1]
    queries, keys = (repeat_key_heads(l2_normed(x), heads).transpose(-2, -3) for x in (q, k))
    # Since the chunk began. In fp64: sums may be in the thousands where a difference is small.
    decayed = g.to(torch.float64).transpose(-1, -2).cumsum(-1).unsqueeze(-1)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=v.device).triu_(1)
    since = (decayed - decayed.transpose(-1, -2)).to(torch.float32)
    between = since.masked_fill_(later, float("-inf")).exp_()  # [C, C]: from token j to token i
    to_last = (decayed[..., -1:, :] - decayed).to(torch.float32).exp_()
    decay = decayed.to(torch.float32).exp_()

    # Row i of the system: what a token stores is its value less what is stored under its key. The
    # diagonal is 1, and is not read.
    rate = beta.to(torch.float32).transpose(-1, -2).unsqueeze(-1)
    system = (keys @ keys.transpose(-1, -2)).mul_(between).mul_(rate)
    wanted = v.to(torch.float32).transpose(-2, -3) - (keys @ state).mul_(decay)
    stored = torch.linalg.solve_triangular(
        system, wanted.mul_(rate), upper=False, unitriangular=True
    )
    seen = (queries @ keys.transpose(-1, -2)).mul_(between)
    out = (queries @ state).mul_(decay).add_(seen @ stored).mul_(scale)
    state.mul_(decay[..., -1:, :]).add_((keys * to_last).transpose(-1, -2) @ stored)
    return out.transpose(-2, -3)


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> Tensor:
    """The result [..., T, N, V] in v.dtype; the state [..., N, K, V] is updated.

    One chunk after another needs memory for one, and no form of the system without a state.
    """
    out = v.new_empty(v.shape)
    if not v.shape[-3]:
        return out
    rows = [torch.split(x, CHUNK, -3) for x in (q, k, v, out)]
    scalars = [torch.split(x, CHUNK, -2) for x in (g, beta)]
    for queries, keys, values, into, decays, rates in zip(*rows, *scalars, strict=True):
        into.copy_(_chunk(queries, keys, values, decays, rates, state, scale))
    return out


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> Tensor:
    """The same of one token, without the dimension T: [N, V] in fp32. No copy of the state is made.

    exp(g) q^T S + (q . k) delta is the result without a second pass over the new state.
    """
    query, key = (repeat_key_heads(l2_normed(x), v.shape[-2]) for x in (q, k))
    decay, rate = (x.to(torch.float32).unsqueeze(-1) for x in (g.exp(), beta))
    recalled, read = torch.bmm(torch.stack((key, query), 1), state).mul_(decay[..., None]).unbind(1)
    delta = rate * (v.to(torch.float32) - recalled)
    state.mul_(decay[..., None]).baddbmm_(key.unsqueeze(-1), delta.unsqueeze(-2))
    return scale * (read + (query * key).sum(-1, keepdim=True) * delta)


@ops.gated_delta_rule.kernel("torch")
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float
) -> Tensor:
    shape = (*v.shape[:-3], v.shape[-2], k.shape[-1], v.shape[-1])
    zeros = v.new_zeros(shape, dtype=torch.float32)
    return _chunks(q, k, v, g, beta, zeros, scale)


@ops.gated_delta_rule_update.kernel("torch", syncs=True)
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
    q, k, values = (as_heads(x) for x in (q, k, v))
    g, beta = (as_rows(x) for x in (g, beta))
    out = values.new_zeros(values.shape)
    lengths, slots = seq_lens.tolist(), state_slots.tolist()
    for s, (start, end) in enumerate(pairwise(query_start.tolist())):
        if start == end:
            continue
        own, state = slice(start, end), recurrent_state[slots[s]]
        if lengths[s] == end - start:
            state.zero_()
        if end - start == 1:
            row = q[start], k[start], values[start], g[start], beta[start]
            out[start] = _step(*row, state, scale)
        else:
            rows = q[own], k[own], values[own], g[own], beta[own]
            out[own] = _chunks(*rows, state, scale)
    return out.view(v.shape)
