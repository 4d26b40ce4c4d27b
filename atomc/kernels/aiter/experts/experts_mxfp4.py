"""Mixtures of experts in MXFP4 with x in codes: AITER's sorting and CK's two products, with the
quantizer that rounds scales to even in between.

Not fused_moe: some kernels of its tables read x in 16 bits, whatever it is, and its quantizer
between the products rounds scales up.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.experts.experts import ACTIVATIONS, relaid_gate_up, ungated
from atomc.kernels.aiter.experts.stages import Stages, installed_stages
from atomc.kernels.aiter.library import Function, installed, no_mxfp4
from atomc.kernels.aiter.linear.packing import e2m1_view, e8m0_view, relaid_scale, relaid_weight
from atomc.kernels.aiter.linear.scaled_linear import not_mxfp4
from atomc.kernels.aiter.rows.quant_triton import dynamic_mxfp4_quant
from atomc.kernels.checks import first_refusal, named, unknown, wrong_result
from atomc.ops.formats import HALVES
from atomc.ops.op import Prepared, Refusal

mxfp4_moe_sort_fwd = Function("mxfp4_moe_sort_fwd", "aiter")
PER_GROUP = 3
# CK reads so many inputs at a time, and AITER sorts the scales of at most so many.
AT_ONCE, MOST = 256, 16384


def _partial_tiles(w2: Tensor) -> Refusal | None:
    hidden, inner = w2.shape[1], 2 * w2.shape[2]
    if hidden % AT_ONCE or inner % AT_ONCE or max(hidden, inner) > MOST:
        return Refusal(
            "shape",
            f"experts of {hidden} x {inner}: AITER takes multiples of {AT_ONCE} up to {MOST}",
        )
    return None


def _relaid_scales(scale: Tensor) -> Prepared:
    return relaid_scale(scale.flatten(0, 1))


@ops.moe_experts_mxfp4.kernel(
    "aiter",
    refuses=first_refusal(
        installed_stages,
        installed(mxfp4_moe_sort_fwd, dynamic_mxfp4_quant),
        no_mxfp4,
        not_mxfp4,
        ungated,
        named("activation", unknown, tuple(ACTIVATIONS)),
        named("out_dtype", wrong_result, HALVES),
        _partial_tiles,
    ),
    prepare={
        "w13": relaid_gate_up,
        "w13_scale": _relaid_scales,
        "w2": relaid_weight,
        "w2_scale": _relaid_scales,
    },
    rounds="once",
)
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: tuple[Tensor, Tensor],
    w13_scale: tuple[Tensor],
    w2: tuple[Tensor],
    w2_scale: tuple[Tensor],
    x_scale: Tensor | None,
    out_dtype: torch.dtype,
    activation: str,
) -> Tensor:
    (gate_up, is_expert), [down], [gate_up_scale], [down_scale] = w13, w2, w13_scale, w2_scale
    tokens, hidden = x.shape[0], down.shape[1]
    if not tokens:
        return x.new_empty((0, hidden), dtype=out_dtype)
    assert x_scale is not None
    products = e2m1_view(gate_up), e2m1_view(down)
    stages = Stages(ids, weights, *products, is_expert, PER_GROUP, activation, out_dtype)

    def sorted_scales(scale: Tensor, columns: int) -> Tensor:
        in_order: Tensor = mxfp4_moe_sort_fwd(
            e8m0_view(scale.contiguous()), stages.places, stages.count, tokens, columns
        )
        return in_order

    gated = stages.gated(
        e2m1_view(x.contiguous()), sorted_scales(x_scale, hidden), e8m0_view(gate_up_scale)
    )
    codes, scales = dynamic_mxfp4_quant(gated.flatten(0, 1))
    return stages.summed(
        e2m1_view(codes.view(*gated.shape[:2], -1)),
        sorted_scales(scales, gated.shape[2]),
        e8m0_view(down_scale),
    )
