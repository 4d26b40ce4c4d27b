"""Mixtures of experts in Triton, by the kernels for few tokens: these sort nothing, add in a fixed
order, and have the same tile here for any number of tokens.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.experts.expert_gate import GateConstants
from atomc.kernels.triton.experts.experts_decode import Stored, unfit
from atomc.kernels.triton.experts.experts_decode_unquantized import compute_tiled, unfit_weights
from atomc.ops.experts import Gate


@ops.moe_experts.kernel("invariant", refuses=first_refusal(unfit, unfit_weights))
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    **gate: Unpack[Gate],
) -> Tensor:
    up, down = Stored(w13, bias=b13), Stored(w2, bias=b2)
    return compute_tiled(1, x, ids, weights, up, down, GateConstants(**gate))
