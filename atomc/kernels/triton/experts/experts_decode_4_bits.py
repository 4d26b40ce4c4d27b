"""Mixtures of experts for few tokens with weights in int4 or MXFP4 and activations of 16 bits or
fp32, in Triton; see experts_decode.py. Codes are unpacked in registers.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike, unsupported, wrong_result
from atomc.kernels.triton.experts.expert_checks import scattered
from atomc.kernels.triton.experts.experts_decode import (
    FEW,
    Form,
    Stored,
    compute,
    refuse_more_tokens,
    unfit,
    up_to_all,
    up_to_half,
)
from atomc.kernels.triton.launch.tiles import EXPERTS_FEW_4_BITS
from atomc.kernels.triton.rows.gate import GateConstants
from atomc.kernels.triton.w4a16.unpacking import code_words, other_group
from atomc.ops.experts import Gate
from atomc.ops.formats import FLOATS
from atomc.ops.scaled_experts import Int4ExpertOperands, ScaledExpertOperands

ARCHS = EXPERTS_FEW_4_BITS.archs


def _compute(
    form: str,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    *,
    group: int,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    up = Stored(code_words(w13), w13_scale, w13_zeros, b13)
    down = Stored(code_words(w2), w2_scale, w2_zeros, b2)
    tile = EXPERTS_FEW_4_BITS.choose(x.device, len(x))
    stored = Form(form, group)
    return compute(x, ids, weights, up, down, stored, GateConstants(**gate), out_dtype, tile)


@ops.moe_experts_w4a16.kernel(
    "triton",
    tokens=FEW,
    limit=up_to_half,
    refuses=first_refusal(
        refuse_more_tokens,
        unfit,
        named("x", unlike, FLOATS),
        named("w13_scale w2_scale", unlike, FLOATS),
        named("b13 b2", unlike, FLOATS),
        other_group,
        scattered,
    ),
    tuned_for=ARCHS,
)
def moe_experts_w4a16(**operands: Unpack[Int4ExpertOperands]) -> Tensor:
    return _compute("int4", out_dtype=operands["x"].dtype, **operands)


@ops.moe_experts_mxfp4.kernel(
    "triton",
    tokens=FEW,
    limit=up_to_all,
    refuses=first_refusal(
        refuse_more_tokens,
        unfit,
        named("x_scale", unsupported, "the kernel for few tokens"),
        named("x", unlike, FLOATS),
        named("b13 b2", unlike, FLOATS),
        named("out_dtype", wrong_result, FLOATS),
        scattered,
    ),
    tuned_for=ARCHS,
)
def moe_experts_mxfp4(out_dtype: torch.dtype, **operands: Unpack[ScaledExpertOperands]) -> Tensor:
    return _compute("e2m1", group=32, out_dtype=out_dtype, **operands)
