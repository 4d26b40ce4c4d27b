"""Convolution, gates and delta rule one after another, as torch calls."""

from torch import Tensor

from atomc import ops
from atomc.kernels.torch.conv import causal_conv1d_update
from atomc.kernels.torch.delta_rule import gated_delta_rule_update
from atomc.ops.conv_delta_rule import split_channels


@ops.conv_gated_delta_rule_update.kernel("torch", syncs=True)
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
) -> Tensor:
    step = query_start, seq_lens, state_slots
    convolved = causal_conv1d_update(x, weight, bias, conv_state, *step, activation=activation)
    g, beta = ops.delta_gates.reference(a, b, A_log, dt_bias, rate_scale)
    q, k, v = split_channels(convolved, recurrent_state)
    return gated_delta_rule_update(q, k, v, g, beta, recurrent_state, *step, scale=scale)
