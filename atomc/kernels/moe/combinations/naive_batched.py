"""Experts of the batched format, one after another: the reference of the format."""

from torch import Tensor

from atomc.kernels.moe.dispatched import ActivationFormat, Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Sizes, WorkspaceShapes
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights
from atomc.kernels.moe.schemes import ALL_SCHEMES
from atomc.kernels.moe.weight_and_reduce import Delegate, WeightAndReduce


class NaiveBatched(ExpertsKernel):
    """Reads the number of rows of each expert on the host."""

    name = "naive_batched"
    activation_formats = (ActivationFormat.BATCHED, ActivationFormat.BATCHED)
    schemes = ALL_SCHEMES
    supports_chunking = False
    supports_expert_map = False

    def workspace_shapes(self, sizes: Sizes) -> WorkspaceShapes:
        return WorkspaceShapes((0,), (0,), (sizes.experts, sizes.rows, sizes.hidden))

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
        assert dispatched.expert_num_tokens is not None
        linear = config.scheme.linear
        for e, rows in enumerate(dispatched.expert_num_tokens.tolist()):
            x = dispatched.x[e, :rows]
            scale = None if dispatched.x_scale is None else dispatched.x_scale[e, :rows]
            w13, w13_scale, b13 = _expert_weights(e, weights.w13, weights.w13_scale, weights.b13)
            w2, w2_scale, b2 = _expert_weights(e, weights.w2, weights.w2_scale, weights.b2)
            h = linear(x, scale, w13, w13_scale, b13, output.dtype)
            codes, scale = config.scheme.quantize(config.gated(h))
            output[e, :rows] = linear(codes, scale, w2, w2_scale, b2, output.dtype)

    def finalize_weight_and_reduce(self) -> WeightAndReduce:
        return Delegate()


def _expert_weights(
    e: int, weight: Tensor, scale: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return weight[e], None if scale is None else scale[e], None if bias is None else bias[e]
