"""Mixtures of experts in Triton, by the kernels for few tokens: these sort nothing, add in a fixed
order, and have the same tile here for any number of tokens.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.triton.experts.experts_decode import Gate, Stored, unfit_arguments
from atomc.kernels.triton.experts.experts_decode_unquantized import compute_tiled, unfit_weights
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_moe_experts(
    platform: Platform,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str = "silu",
    weight_on_input: bool = False,
    **_: object,
) -> Refusal | None:
    return unfit_arguments(
        platform, x, ids, weights, w13, w2, b13, b2, activation
    ) or unfit_weights(x, w13, w2, b13, b2, weight_on_input)


@ops.moe_experts.kernel("invariant", refuses=refuse_moe_experts)
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
    up, down = Stored(w13, None, None, b13), Stored(w2, None, None, b2)
    return compute_tiled(1, x, ids, weights, up, down, gate)
