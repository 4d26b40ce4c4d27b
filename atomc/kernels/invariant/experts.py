"""Mixtures of experts in Triton, by the kernels for few tokens: these sort nothing, add in a fixed
order, and have the same tile here for any number of tokens.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.triton.experts.experts_decode import unfit
from atomc.kernels.triton.experts.experts_decode_unquantized import compute_tiled, unfit_weights
from atomc.ops.experts import ExpertOperands


@ops.moe_experts.kernel("invariant", refuses=first_refusal(unfit, unfit_weights))
def moe_experts(**operands: Unpack[ExpertOperands]) -> Tensor:
    return compute_tiled(1, **operands)
