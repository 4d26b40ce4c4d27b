"""Experts in bf16 on a GPU by the grouped matrix product of PyTorch, which reads the ends of the
groups on the device: it can be captured in a CUDA graph.

T tokens, k choices of each, P = T * k pairs, as in experts.py.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import older_than, uneven, unlike
from atomc.kernels.torch.experts import weighted_input, weighted_sum
from atomc.ops.experts import gated
from atomc.ops.op import Refusal
from atomc.platform import Platform

ALIGNED = 8  # elements of bf16 in the 16 bytes to which strides must be aligned


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
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Refusal | None:
    if platform.is_cpu:
        return Refusal("slower", "on a CPU a loop over the experts is as fast")
    return (
        older_than((9, 0), platform, "torch._grouped_mm runs")
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
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    weight_on_input: bool = False,
) -> Tensor:
    count = len(w13)
    flat = ids.flatten().to(torch.int64)
    # Pairs of unknown experts go behind all others, where no group reaches.
    expert, order = flat.where((flat >= 0) & (flat < count), count).sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(count, device=x.device), right=True)
    ends = ends.to(torch.int32)
    own = expert.clamp(max=count - 1)

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch._grouped_mm(rows, weight.transpose(1, 2), ends)
        return out if bias is None else out + bias[own]

    rows = weighted_input(x, weights)[order] if weight_on_input else x[order // ids.shape[1]]
    h = gated(product(rows, w13, b13), activation, interleaved, alpha, limit)
    sums = product(h, w2, b2).masked_fill((expert == count).unsqueeze(-1), 0)
    by_pair = torch.empty_like(sums)
    by_pair[order] = sums
    return weighted_sum(by_pair, ids, None if weight_on_input else weights)
