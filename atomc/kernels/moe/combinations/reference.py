"""Experts in the standard format by the references of the ops, on any device."""

import torch
from torch import Tensor

from atomc.kernels.moe.dispatched import Dispatched
from atomc.kernels.moe.experts import ExpertsKernel, Spaces
from atomc.kernels.moe.layer import ExpertsConfig, ExpertWeights, RankExperts
from atomc.ops.experts import moe_experts
from atomc.ops.scaled_experts import moe_experts_fp8, moe_experts_int8


class Reference(ExpertsKernel):
    """One expert after another, with a copy of the rows of each."""

    name = "reference"

    def apply(
        self, output: Tensor, spaces: Spaces, dispatched: Dispatched, experts: RankExperts
    ) -> None:
        output.copy_(
            experts_reference(
                dispatched.x,
                dispatched.x_scale,
                experts.local_ids(dispatched.ids),
                dispatched.weights,
                experts.weights,
                experts.config,
                output.dtype,
            )
        )


def experts_reference(
    x: Tensor,
    x_scale: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    of_experts: ExpertWeights,
    config: ExpertsConfig,
    out_dtype: torch.dtype,
) -> Tensor:
    """The reference of the op of this scheme. Ids are rows of the weights."""
    w, scheme = of_experts, config.scheme
    if x_scale is None:
        return moe_experts.reference(x, ids, weights, w.w13, w.w2, w.b13, w.b2, **config.gate)
    assert w.w13_scale is not None and w.w2_scale is not None
    arguments = (x, x_scale, ids, weights, w.w13, w.w13_scale, w.w2, w.w2_scale, w.b13, w.b2)
    if scheme.name == "int8":
        return moe_experts_int8.reference(*arguments, out_dtype=out_dtype, **config.gate)
    return moe_experts_fp8.reference(
        *arguments, out_dtype=out_dtype, block=scheme.block, **config.gate
    )
