"""Experts in bf16 on a GPU by the grouped matrix product of PyTorch, which reads the ends of the
groups on the device: it can be captured in a CUDA graph.

T tokens, k choices of each, P = T * k pairs.
"""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import older_than, uneven, unlike
from atomc.kernels.grouped_experts import grouped_experts
from atomc.ops.experts import Gate, gated, weighted_sum
from atomc.ops.op import Refusal
from atomc.platform import Platform

ALIGNED = 8  # elements of bf16 in the 16 bytes to which strides must be aligned


def refuse_moe_experts(platform: Platform, x: Tensor, w13: Tensor, w2: Tensor) -> Refusal | None:
    if platform.is_cpu:
        return Refusal("slower", "on a CPU a loop over the experts is as fast")
    return (
        older_than((9, 0), platform, "torch.nn.functional.grouped_mm runs")
        or unlike((torch.bfloat16,), x=x, w13=w13, w2=w2)
        or uneven(w2.shape[1], ALIGNED)
        or uneven(w2.shape[2], ALIGNED)
        or _scattered(w13, "w13")
        or _scattered(w2, "w2")
    )


def _scattered(weight: Tensor, name: str) -> Refusal | None:
    """Refuse weights that are neither contiguous nor contiguous once transposed."""
    if weight.is_contiguous() or weight.transpose(1, 2).is_contiguous():
        return None
    return Refusal("layout", f"{name} is not contiguous in memory")


@ops.moe_experts.kernel("torch", refuses=refuse_moe_experts)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    weight_on_input: bool,
    **gate: Unpack[Gate],
) -> Tensor:
    by_pair = x.new_empty(ids.numel(), x.shape[1])
    on_input = weights if weight_on_input else None
    between = partial(gated, **gate)
    grouped_experts(by_pair, x, ids, w13, w2, b13, b2, between, on_input)
    return weighted_sum(by_pair, ids, None if weight_on_input else weights)
