"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", eq. 10): linear attention whose
state, a matrix per head, decays and is corrected by each token.

T tokens, H key heads, N value heads, K key width, V value width, S sequences.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_shapes import shape_of_x
from atomc.ops.op_traits import Arguments, Kind
from atomc.ops.state import StateSpec, state_before, state_handle
from atomc.ops.state_update import replacing_state, updated_by

L2_EPS = 1e-6


def delta_state(heads: int, key_dim: int, value_dim: int) -> nn.Buffer:
    """The handle of a layer's state, for `ops.gated_delta_rule`: `self.delta_state =
    ops.delta_state(...)`. heads: of the values.
    """
    return state_handle(heads, key_dim, value_dim)


def l2_normed(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + L2_EPS) over the last dimension, in fp32."""
    x = x.to(torch.float32)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def repeat_key_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or queries [..., H, K] of each value head: [..., N, K]. Value head n reads key head n //
    (N // H).
    """
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The result [..., T, N, V] in v.dtype, and the state [..., N, K, V] after the last token."""
    heads = v.shape[-2]
    q, k = (repeat_key_heads(l2_normed(x), heads) for x in (q, k))
    values, decay, rate = (x.to(torch.float32) for x in (v, g, beta))
    decay, outs = decay.exp(), []
    for t in range(v.shape[-3]):
        key, query = k[..., t, :, :], q[..., t, :, :] * scale
        state = state * decay[..., t, :, None, None]
        recalled = (key.unsqueeze(-2) @ state).squeeze(-2)
        delta = rate[..., t, :, None] * (values[..., t, :, :] - recalled)
        state = state + key.unsqueeze(-1) * delta.unsqueeze(-2)
        outs.append((query.unsqueeze(-2) @ state).squeeze(-2))
    out = torch.stack(outs, -3) if outs else values.clone()
    return out.to(v.dtype), state


def _work(call: OpCall) -> Work:
    """FLOPs of the formula: a kernel that multiplies chunks has more of them."""
    operands = [call[name] for name in ("q", "k", "v", "g", "beta")]
    return bytes_of([*operands, *call.results]), 6 * call["v"].numel * call["k"].shape[-1]


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=replacing_state(_work),
    mutates=("recurrent_state",),
    rounds_once=lambda _: True,
    shape=lambda v: shape_of_x(v),
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
    *,
    scale: float,
) -> Tensor:
    """gated_delta_rule of ragged sequences. q, k [..., H, K], v [..., N, V], g and beta [..., N] (T
    rows) -> [..., N, V]; rows of no sequence are zero.

    recurrent_state [slots, N, K, V] fp32 has the state of sequence s before the step in row
    state_slots[s]; it is replaced by that after the step. query_start and seq_lens as in
    paged_attention. The slot of a sequence without new tokens is not written.
    """
    before = state_before(recurrent_state, query_start, seq_lens, state_slots)
    q, k, values = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    g, beta = (x.reshape(-1, x.shape[-1]) for x in (g, beta))
    out = values.new_zeros(values.shape)
    for s, (start, end) in enumerate(pairwise(query_start.tolist())):
        if start == end:
            continue
        own = slice(start, end)
        new = q[own], k[own], values[own], g[own], beta[own]
        out[own], recurrent_state[state_slots[s]] = _recurrent(*new, before[s], scale)
    return out.view(v.shape)


def _spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    """In fp32: errors of a state that is rounded at each token add up."""
    heads, value_dim = arguments["v"].shape[-2:]
    shape = (heads, arguments["k"].shape[-1], value_dim)
    return StateSpec.of(name, "recurrent", (shape,), torch.float32)


@op(
    kind=Kind.OTHER,
    rows=None,
    cost=_work,
    rounds_once=lambda _: True,
    shape=lambda v: shape_of_x(v),
    state=updated_by(
        gated_delta_rule_update, lambda arguments: math.prod(arguments["v"].shape[:-2]), _spec
    ),
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """For each token and value head, from a matrix S [K, V] of zeros on:

        S = exp(g) S;  S = S + k (beta (v - k^T S))^T;  out = scale q^T S

    with q and k divided by sqrt(sum(x^2) + 1e-6). Computed in fp32 -> [..., T, N, V] in v.dtype.

    q, k   [..., T, H, K]; value head n reads key head n // (N // H)
    v      [..., T, N, V]
    g      [..., T, N] fp32, the logarithm of the decay
    beta   [..., T, N], the rate at which a token replaces what its key has stored
    state  the layer's state handle (delta_state), which only the runtime uses
    scale  of the queries, for example K ** -0.5
    """
    heads, width = v.shape[-2:]
    zeros = v.new_zeros((*v.shape[:-3], heads, k.shape[-1], width), dtype=torch.float32)
    return _recurrent(q, k, v, g, beta, zeros, scale)[0]
