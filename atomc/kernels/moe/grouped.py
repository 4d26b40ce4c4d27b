"""Experts with torch's grouped product: rows sorted by expert, one product of all experts."""

from torch import Tensor

from atomc.kernels.grouped_experts import grouped_experts
from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Sizes, Spaces, WorkspaceShapes
from atomc.kernels.moe.layer import RankExperts
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
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        w = experts.weights
        ids, gate = experts.local_ids(dispatched.ids), experts.config.gated
        grouped_experts(output.flatten(0, 1), dispatched.x, ids, w.w13, w.w2, w.b13, w.b2, gate)

    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return Contiguous()
