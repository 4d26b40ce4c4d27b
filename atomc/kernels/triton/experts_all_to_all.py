"""Experts of several processes: all-to-all of tokens, and the Triton kernels of many tokens."""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.moe.as_kernel import PlacedExperts, sent_to_experts
from atomc.kernels.moe.triton_standard import Triton
from atomc.kernels.triton.experts.experts_prefill import refuse_moe_experts
from atomc.kernels.triton.launch.tiles import MOE_EXPERTS


@ops.moe_experts_ep.kernel(
    "triton", refuses=refuse_moe_experts, syncs=True, tuned_for=MOE_EXPERTS.archs
)
def moe_experts_ep(**operands: Unpack[PlacedExperts]) -> Tensor:
    return sent_to_experts(Triton(), **operands)
