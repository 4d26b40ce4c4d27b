"""The scan of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", eq. 1 and 2, with one decay for a
head).

T tokens, N heads, P width of a head, G groups of heads that share B and C, S width of the state of
a column of a head. Head n is in group n // (N // G).
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_shapes import shape_of_x
from atomc.ops.op_traits import Arguments, Kind
from atomc.ops.state import StateSpec, state_before, state_handle
from atomc.ops.state_update import replacing_state, updated_by


def ssm_state(heads: int, head_dim: int, state_size: int) -> nn.Buffer:
    """The handle of a layer's state, for `ops.ssm_scan`: `self.ssm = ops.ssm_state(...)`."""
    return state_handle(heads, head_dim, state_size)


def time_steps(dt: Tensor, dt_bias: Tensor, dt_min: float, dt_max: float | None) -> Tensor:
    """The time steps [..., T, N] in fp32 of projected ones."""
    steps = F.softplus(dt.to(torch.float32) + dt_bias.to(torch.float32))
    return steps.clamp(dt_min, dt_max)


def repeat_groups(x: Tensor, heads: int) -> Tensor:
    """B or C [..., G, S] of each head in fp32, [..., N, S]."""
    return x.to(torch.float32).repeat_interleave(heads // x.shape[-2], -2)


def _scan(
    a: Tensor, state: Tensor, x: Tensor, steps: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """The results [..., T, N, P] of a scan from `state`, and the state after it. In fp32: a
    [N], state [..., N, P, S], x [..., T, N, P], steps [..., T, N], b and c [..., T, N, S].
    """
    rows = []
    for t in range(x.shape[-3]):
        decay = torch.exp(a * steps[..., t, :])[..., None, None]
        into = (steps[..., t, :, None] * x[..., t, :, :]).unsqueeze(-1)
        state = decay * state + into * b[..., t, :, None, :]
        rows.append((state * c[..., t, :, None, :]).sum(-1))
    return torch.stack(rows, -3) if rows else x, state


def _spec(name: str, arguments: Arguments, codes: torch.dtype | None) -> StateSpec:
    shape = (*arguments["x"].shape[-2:], arguments["b"].shape[-1])
    return StateSpec.of(name, "recurrent", (shape,), torch.float32)


def _work(call: OpCall) -> Work:
    """For each token and number of the state: decay, input, and the sum with C."""
    x, width = call["x"], call["b"].shape[-1]
    read = [call[name] for name in ("x", "dt", "a_log", "b", "c", "d", "dt_bias")]
    return bytes_of([*read, *call.results]), 6 * x.numel * width


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=replacing_state(_work),
    mutates=("recurrent_state",),
    rounds_once=lambda _: True,
    shape=shape_of_x,
)
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
    *,
    dt_min: float,
    dt_max: float | None,
) -> Tensor:
    """ssm_scan of ragged sequences. x [..., N, P], dt [..., N], b and c [..., G, S] (T rows) ->
    [..., N, P]; rows of no sequence are zero.

    recurrent_state [slots, N, P, S] fp32 has the state of sequence s before the step in row
    state_slots[s]; it is replaced by that after the step. query_start and seq_lens as in
    paged_attention. The slot of a sequence without new tokens is not written.
    """
    rows, heads = x.reshape(-1, *x.shape[-2:]).to(torch.float32), x.shape[-2]
    steps = time_steps(dt.reshape(-1, heads), dt_bias, dt_min, dt_max)
    a = -torch.exp(a_log.to(torch.float32))
    b, c = (repeat_groups(part.reshape(-1, *part.shape[-2:]), heads) for part in (b, c))
    before = state_before(recurrent_state, query_start, seq_lens, state_slots)
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    for s, (start, end) in enumerate(pairwise(query_start.tolist())):
        if start == end:
            continue
        new = [part[start:end] for part in (rows, steps, b, c)]
        result, after = _scan(a, before[s], *new)
        out[start:end] = result + d.to(torch.float32)[:, None] * new[0]
        recurrent_state[state_slots[s]] = after
    return out.to(x.dtype).view(x.shape)


@op(
    kind=Kind.OTHER,
    rows=None,
    cost=_work,
    rounds_once=lambda _: True,
    shape=shape_of_x,
    state=updated_by(
        ssm_scan_update, lambda arguments: math.prod(arguments["x"].shape[:-2]), _spec
    ),
)
def ssm_scan(
    x: Tensor,
    dt: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor | None = None,
    *,
    dt_min: float,
    dt_max: float | None,
) -> Tensor:
    """h[t] = exp(-exp(a_log) s[t]) h[t - 1] + s[t] x[t] B[t]^T, and h[t] C[t] + d x[t] -> [..., T,
    N, P], with the time steps s[t] = softplus(dt[t] + dt_bias), limited to dt_min..dt_max.

    Computed in fp32 and rounded once; h is zero before the first token.

    x               [..., T, N, P]
    dt              [..., T, N]
    b, c            [..., T, G, S]
    a_log, d, dt_bias  [N]
    dt_max          None: no limit
    state           the layer's state handle (ssm_state), which only the runtime uses
    """
    heads, rows = x.shape[-2], x.to(torch.float32)
    steps = time_steps(dt, dt_bias, dt_min, dt_max)
    b, c = repeat_groups(b, heads), repeat_groups(c, heads)
    before = rows.new_zeros((*x.shape[:-3], *x.shape[-2:], b.shape[-1]))
    out, _ = _scan(-torch.exp(a_log.to(torch.float32)), before, rows, steps, b, c)
    return (out + d.to(torch.float32)[:, None] * rows).to(x.dtype)
