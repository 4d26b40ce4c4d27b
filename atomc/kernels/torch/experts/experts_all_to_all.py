"""Experts of several processes: all-to-all of tokens, and the grouped product of PyTorch."""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import unlike
from atomc.kernels.moe.as_kernel import PlacedExperts, sent_to_experts
from atomc.kernels.moe.grouped import Grouped
from atomc.kernels.torch.experts.experts_grouped_mm import refuse_moe_experts
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_moe_experts_ep(platform: Platform, x: Tensor, w13: Tensor, w2: Tensor) -> Refusal | None:
    if platform.is_cpu:
        return unlike((torch.bfloat16, torch.float32), x=x, w13=w13, w2=w2)
    return refuse_moe_experts(platform, x, w13, w2)


@ops.moe_experts_ep.kernel("torch", refuses=refuse_moe_experts_ep, syncs=True)
def moe_experts_ep(**operands: Unpack[PlacedExperts]) -> Tensor:
    return sent_to_experts(Grouped(), **operands)
