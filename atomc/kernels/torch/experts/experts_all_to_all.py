"""Experts of several processes: all-to-all of tokens, and the grouped product of PyTorch."""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import unlike
from atomc.kernels.moe.as_kernel import sent_to_experts
from atomc.kernels.moe.grouped import Grouped
from atomc.kernels.moe.layer import ExpertWeights
from atomc.kernels.torch.experts.experts_grouped_mm import refuse_moe_experts
from atomc.ops.experts import Gate
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_moe_experts_ep(platform: Platform, x: Tensor, w13: Tensor, w2: Tensor) -> Refusal | None:
    if platform.is_cpu:
        return unlike((torch.bfloat16, torch.float32), x=x, w13=w13, w2=w2)
    return refuse_moe_experts(platform, x, w13, w2)


@ops.moe_experts_ep.kernel("torch", refuses=refuse_moe_experts_ep, syncs=True)
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
        Grouped(),
        x,
        ids,
        weights,
        places,
        ExpertWeights(w13, w2, b13=b13, b2=b2),
        nowhere,
        process_group,
        gate,
    )
