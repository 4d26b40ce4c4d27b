"""Experts of several processes: all-to-all of tokens, and the Triton kernels of many tokens."""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.moe.as_kernel import sent_to_experts
from atomc.kernels.moe.layer import ExpertWeights
from atomc.kernels.moe.triton_standard import Triton
from atomc.kernels.triton.experts.experts_prefill import refuse_moe_experts
from atomc.kernels.triton.launch.tiles import MOE_EXPERTS
from atomc.ops.experts import Gate


@ops.moe_experts_ep.kernel(
    "triton", refuses=refuse_moe_experts, syncs=True, tuned_for=MOE_EXPERTS.archs
)
def moe_experts_ep(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    nowhere: int,
    process_group: str,
    **gate: Unpack[Gate],
) -> Tensor:
    return sent_to_experts(
        Triton(),
        x,
        ids,
        weights,
        places,
        ExpertWeights(w13, w2, b13=b13, b2=b2),
        nowhere,
        process_group,
        gate,
    )
