"""The gates of a gated delta rule, from what a layer projects (Yang et al. 2024, "Gated Delta
Networks"; Mamba's parametrization of the decay).

N value heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_traits import Kind


@op(kind=Kind.OTHER, rows=None, rounds_once=lambda _: True)
def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rate_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(-exp(A_log) softplus(a + dt_bias) in fp32, rate_scale sigmoid(b) in b.dtype): g and beta of
    gated_delta_rule.

    a, b       [..., N] -> [..., N] each
    A_log      [N]; exp(A_log) may be infinite in fp16, so it is computed in fp32
    dt_bias    [N]
    rate_scale 2 where the state may have negative eigenvalues (OLMo Hybrid)
    """
    decay = -A_log.to(torch.float32).exp() * F.softplus(a.to(torch.float32) + dt_bias)
    rate = b.sigmoid()
    return decay, rate if rate_scale == 1.0 else rate * rate_scale
