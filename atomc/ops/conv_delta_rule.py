"""What a gated delta net computes between its projections and its norm, as one op on the states of
the runtime, so that one kernel can take a whole step of decoding.

T rows, C channels, H key heads, N value heads, K key width, V value width, S sequences.
"""

import torch
from torch import Tensor

from atomc.ops.conv import causal_conv1d_update
from atomc.ops.delta_gates import delta_gates
from atomc.ops.delta_rule import gated_delta_rule_update
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of
from atomc.ops.op_traits import Kind
from atomc.ops.state_update import replacing_state


def split_channels(x: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [..., H, K], and v [..., N, V], from channels [..., 2 H K + N V]."""
    heads, key_width, width = recurrent_state.shape[1:]
    keys = (x.shape[-1] - heads * width) // 2
    q, k, v = torch.split(x, [keys, keys, heads * width], -1)
    return (
        torch.unflatten(q, -1, (-1, key_width)),
        torch.unflatten(k, -1, (-1, key_width)),
        torch.unflatten(v, -1, (heads, width)),
    )


def _work(call: OpCall) -> Work:
    read = [call[name] for name in ("x", "weight", "a", "b", "A_log", "dt_bias")]
    (out,) = call.results
    products = 2 * call["x"].numel * call["weight"].shape[-1]
    products = products + 6 * out.numel * call["recurrent_state"].shape[-2]
    return bytes_of([*read, out]), products


def _values(x: Tensor, recurrent_state: Tensor) -> Tensor:
    heads, _key_width, width = recurrent_state.shape[1:]
    return x.new_empty((*x.shape[:-1], heads, width))


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=replacing_state(_work),
    mutates=("conv_state", "recurrent_state"),
    shape=_values,
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
    *,
    activation: str,
    scale: float,
    rate_scale: float = 1.0,
) -> Tensor:
    """gated_delta_rule_update of the channels of causal_conv1d_update, with the gates of
    delta_gates. x [..., C], of which H K channels are queries, as many keys and N V values; a and b
    [..., N] (T rows) -> [..., N, V]; rows of no sequence are zero.

    conv_state [slots, taps - 1, C], recurrent_state [slots, N, K, V] fp32 and the other arguments
    as in these ops.
    """
    step = query_start, seq_lens, state_slots
    convolved = causal_conv1d_update.reference(
        x, weight, bias, conv_state, *step, activation=activation
    )
    assert isinstance(convolved, Tensor)
    g, beta = delta_gates.reference(a, b, A_log, dt_bias, rate_scale)
    q, k, v = split_channels(convolved, recurrent_state)
    out = gated_delta_rule_update.reference(q, k, v, g, beta, recurrent_state, *step, scale=scale)
    assert isinstance(out, Tensor)
    return out
