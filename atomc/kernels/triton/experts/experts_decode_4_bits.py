"""Mixtures of experts for few tokens with weights in int4 or MXFP4 and activations of 16 bits or
fp32, in Triton; see experts_decode.py. Codes are unpacked in registers.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, unlike, unsupported, wrong_result
from atomc.kernels.triton.experts.expert_checks import scattered
from atomc.kernels.triton.experts.expert_gate import GateConstants
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
from atomc.kernels.triton.w4a16.unpacking import code_words, other_group
from atomc.ops.experts import Gate
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal

ARCHS = EXPERTS_FEW_4_BITS.archs


def refuse_int4_types(
    x: Tensor, w13_scale: Tensor, w2_scale: Tensor, b13: Tensor | None, b2: Tensor | None
) -> Refusal | None:
    return (
        unlike(FLOATS, x=x)
        or unlike(FLOATS, w13_scale=w13_scale, w2_scale=w2_scale)
        or unlike(FLOATS, b13=b13, b2=b2)
    )


@ops.moe_experts_w4a16.kernel(
    "triton",
    tokens=FEW,
    limit=up_to_half,
    refuses=first_refusal(refuse_more_tokens, unfit, refuse_int4_types, other_group, scattered),
    tuned_for=ARCHS,
)
def moe_experts_w4a16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_zeros: Tensor | None,
    w2_zeros: Tensor | None,
    b13: Tensor | None,
    b2: Tensor | None,
    group: int,
    **gate: Unpack[Gate],
) -> Tensor:
    return compute(
        x,
        ids,
        weights,
        Stored(w13, w13_scale, w13_zeros, b13),
        Stored(w2, w2_scale, w2_zeros, b2),
        Form("int4", group),
        GateConstants(**gate),
        x.dtype,
        EXPERTS_FEW_4_BITS.choose(x.device, len(x)),
    )


def refuse_mxfp4_types(
    x: Tensor, b13: Tensor | None, b2: Tensor | None, x_scale: Tensor | None, out_dtype: torch.dtype
) -> Refusal | None:
    return (
        unsupported("the kernel for few tokens", x_scale=x_scale)
        or unlike(FLOATS, x=x)
        or unlike(FLOATS, b13=b13, b2=b2)
        or wrong_result(FLOATS, out_dtype)
    )


@ops.moe_experts_mxfp4.kernel(
    "triton",
    tokens=FEW,
    limit=up_to_all,
    refuses=first_refusal(refuse_more_tokens, unfit, refuse_mxfp4_types, scattered),
    tuned_for=ARCHS,
)
def moe_experts_mxfp4(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    return compute(
        x,
        ids,
        weights,
        Stored(code_words(w13), w13_scale, None, b13),
        Stored(code_words(w2), w2_scale, None, b2),
        Form("e2m1", 32),
        GateConstants(**gate),
        out_dtype,
        EXPERTS_FEW_4_BITS.choose(x.device, len(x)),
    )
