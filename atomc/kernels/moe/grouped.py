"""Experts with torch's grouped product: rows sorted by expert, one product of all experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.experts import Experts, Sizes, WorkspaceShapes, local_ids
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights
from atomc.kernels.moe.weight_and_reduce import Contiguous, WeightAndReduce


class Grouped(Experts):
    """torch.nn.functional.grouped_mm, which allocates its results. On a CUDA device, torch requires
    that H and I are multiples of 16 bytes.
    """

    name = "grouped"
    activation_formats = (ActivationFormat.STANDARD, ActivationFormat.STANDARD)
    schemes = ("none",)
    supports_chunking = True
    supports_expert_map = True

    def workspace_shapes(self, sizes: Sizes) -> WorkspaceShapes:
        return WorkspaceShapes((0,), (0,), (sizes.rows, sizes.choices, sizes.hidden))

    def apply(
        self,
        output: Tensor,
        workspace13: Tensor,
        workspace2: Tensor,
        dispatched: Dispatched,
        weights: ExpertWeights,
        expert_map: Tensor | None,
        config: ExpertsConfig,
    ) -> None:
        experts = weights.num_experts
        local = local_ids(dispatched.ids, expert_map, experts)
        by_choice = local.masked_fill(local < 0, experts).flatten()  # those of other ranks last
        expert, order = by_choice.sort(stable=True)
        bounds = torch.arange(experts, device=expert.device)
        ends = torch.searchsorted(expert, bounds, right=True).int()
        bias = expert.clamp(max=experts - 1)

        h = _product(dispatched.x[order // local.shape[1]], weights.w13, weights.b13, ends, bias)
        y = _product(config.gated(h), weights.w2, weights.b2, ends, bias)
        # grouped_mm does not write the rows behind the last end.
        output.flatten(0, 1)[order] = y.masked_fill((expert == experts).unsqueeze(-1), 0)

    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return Contiguous()


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, expert: Tensor
) -> Tensor:
    """x [N, K] sorted by expert, e's until ends[e] [L]; weight [L, O, K] -> [N, O]."""
    y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return y if bias is None else y + bias[expert]
