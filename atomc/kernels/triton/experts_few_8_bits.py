"""Mixtures of experts for few tokens with weights in fp8 or int8, in Triton; see experts_few.py."""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import no_fp8_products, strided, unlike, wrong_result
from atomc.kernels.triton.experts_few import FEW, Form, Gate, Stored, compute, unfit_call
from atomc.kernels.triton.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
)
from atomc.kernels.triton.tiles import EXPERTS_FEW_8_BITS
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

BLOCK = 128
ARCHS = EXPERTS_FEW_8_BITS.archs


def refuse_moe_experts_fp8_few(
    platform: Platform,
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    act_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    block: int = 0,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Refusal | None:
    if block not in (0, BLOCK):
        return Refusal("shape", f"blocks of {block}: written for {BLOCK}")
    return (
        _unfit(
            platform, x, ids, weights, w13, w13_scale, w2, w2_scale, b13, b2, out_dtype, activation
        )
        or unlike((torch.float8_e4m3fn,), x=x, w13=w13, w2=w2)
        or no_fp8_products(platform, x.dtype)
    )


def refuse_moe_experts_int8_few(
    platform: Platform,
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Refusal | None:
    return unlike((torch.int8,), x=x, w13=w13, w2=w2) or _unfit(
        platform, x, ids, weights, w13, w13_scale, w2, w2_scale, b13, b2, out_dtype, activation
    )


def _unfit(
    platform: Platform,
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
    activation: str,
) -> Refusal | None:
    return (
        unfit_call(platform, x, ids, weights, w13, w2, b13, b2, activation)
        or strided(w13=w13, w2=w2, w13_scale=w13_scale, w2_scale=w2_scale)
        or unlike((torch.float32,), w13_scale=w13_scale, w2_scale=w2_scale)
        or unlike(FLOATS, b13=b13, b2=b2)
        or wrong_result(FLOATS, out_dtype)
    )


@ops.moe_experts_fp8.kernel(
    "triton", tokens=FEW, refuses=refuse_moe_experts_fp8_few, tuned_for=ARCHS
)
def moe_experts_fp8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    act_scale: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    block: int = 0,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Tensor:
    def quantized(h: Tensor) -> tuple[Tensor, Tensor]:
        if block:
            return quant_fp8_group(h, block, dtype=x.dtype)
        if act_scale is None:
            return quant_fp8_per_token(h, x.dtype)
        return quant_fp8_static(h, act_scale, x.dtype), act_scale

    return compute(
        x,
        x_scale,
        ids,
        weights,
        Stored(w13, w13_scale, None, b13),
        Stored(w2, w2_scale, None, b2),
        Form("codes", block),
        Gate(activation, interleaved, alpha, limit),
        out_dtype,
        EXPERTS_FEW_8_BITS.choose(x.device, len(x)),
        quantized,
    )


@ops.moe_experts_int8.kernel(
    "triton", tokens=FEW, refuses=refuse_moe_experts_int8_few, tuned_for=ARCHS
)
def moe_experts_int8(
    x: Tensor,
    x_scale: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
) -> Tensor:
    return compute(
        x,
        x_scale,
        ids,
        weights,
        Stored(w13, w13_scale, None, b13),
        Stored(w2, w2_scale, None, b2),
        Form("codes"),
        Gate(activation, interleaved, alpha, limit),
        out_dtype,
        EXPERTS_FEW_8_BITS.choose(x.device, len(x)),
        quant_int8_per_token,
    )
