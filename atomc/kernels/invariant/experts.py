"""Mixtures of experts in Triton, by the kernels for few tokens: these sort nothing, add in a fixed
order, and have the same tile here for any number of tokens.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.experts.expert_gate import Gate
from atomc.kernels.triton.experts.experts_decode import Stored, unfit
from atomc.kernels.triton.experts.experts_decode_unquantized import compute_tiled, unfit_weights


@ops.moe_experts.kernel("invariant", refuses=first_refusal(unfit, unfit_weights))
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Tensor:
    gate = Gate(activation, interleaved, alpha, limit)
    up, down = Stored(w13, bias=b13), Stored(w2, bias=b2)
    return compute_tiled(1, x, ids, weights, up, down, gate)
