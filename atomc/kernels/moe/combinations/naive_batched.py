"""Experts of the batched format, one after another: the reference of the format."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import BatchedExperts, Spaces
from atomc.kernels.moe.layer import RankExperts
from atomc.kernels.moe.schemes import ExpertsScheme
from atomc.ops.scaled_linear import scaled_linear_fp8, scaled_linear_fp8_block, scaled_linear_int8


class NaiveBatched(BatchedExperts):
    """Reads the number of rows of each expert on the host."""

    name = "naive_batched"

    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        assert dispatched.expert_num_tokens is not None
        weights, config = experts.weights, experts.config
        linear = partial(_linear, config.scheme, output.dtype)
        for e, rows in enumerate(dispatched.expert_num_tokens.tolist()):
            x = dispatched.x[e, :rows]
            scale = None if dispatched.x_scale is None else dispatched.x_scale[e, :rows]
            w13, w13_scale, b13 = _expert_weights(e, weights.w13, weights.w13_scale, weights.b13)
            w2, w2_scale, b2 = _expert_weights(e, weights.w2, weights.w2_scale, weights.b2)
            h = linear(x, scale, w13, w13_scale, b13)
            codes, scale = config.scheme.quantize(config.gated(h))
            output[e, :rows] = linear(codes, scale, w2, w2_scale, b2)


def _expert_weights(
    e: int, weight: Tensor, scale: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return weight[e], None if scale is None else scale[e], None if bias is None else bias[e]


def _linear(
    scheme: ExpertsScheme,
    out_dtype: torch.dtype,
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The reference of the op of this scheme: x [M, K], weight [N, K] -> [M, N]."""
    if x_scale is None:
        return F.linear(x, weight, bias)
    assert weight_scale is not None
    operands = (x, weight, x_scale, weight_scale, bias)
    if scheme.name == "int8":
        return scaled_linear_int8.reference(*operands, out_dtype=out_dtype)
    if scheme.block:
        return scaled_linear_fp8_block.reference(*operands, out_dtype=out_dtype, block=scheme.block)
    return scaled_linear_fp8.reference(*operands, out_dtype=out_dtype)
