"""Experts with torch's grouped product: rows sorted by expert, one product of all experts."""

from torch import Tensor

from atomc.kernels.grouped_experts import grouped_experts
from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Sizes, WorkspaceShapes, local_ids
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights
from atomc.kernels.moe.weight_and_reduce import Contiguous, WeightAndReduce


class Grouped(ExpertsKernel):
    """torch.nn.functional.grouped_mm, which allocates its results. On a CUDA device, torch requires
    that H and I are multiples of 16 bytes.
    """

    name = "grouped"
    schemes = ("none",)

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
        grouped_experts(
            output.flatten(0, 1),
            dispatched.x,
            local_ids(dispatched.ids, expert_map, weights.num_experts),
            weights.w13,
            weights.w2,
            weights.b13,
            weights.b2,
            config.gated,
        )

    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return Contiguous()
