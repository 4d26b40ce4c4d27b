"""Norms by AITER's HIP and CK kernels, in fp32 from the sum that is normed to the product with the
weight, rounded once.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, dense_rows, scattered, unfit
from atomc.kernels.checks import too_wide, uneven, unlike, wrong_rank
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

rmsnorm2d_fwd = Function("rmsnorm2d_fwd", "aiter")
rmsnorm = Function("rmsnorm", "aiter", takes=["gemma_norm"])
rmsnorm2d_fwd_with_add = Function("rmsnorm2d_fwd_with_add", "aiter", takes=["gemma_norm"])
layernorm2d_fwd = Function("layernorm2d_fwd", "aiter")
layernorm2d_fwd_with_add = Function("layernorm2d_fwd_with_add", "aiter")

MAX_COLUMNS = 8192
# The HIP kernels store whole dwords: of rows of an odd width, the last one ends in the next row.
STORED_COLUMNS = 2


def refuse_rms_norm(
    platform: Platform, x: Tensor, weight: Tensor, style: str, residual: Tensor | None = None
) -> Refusal | None:
    function = rmsnorm if style == "one_plus" else rmsnorm2d_fwd
    return (
        unfit(platform, function if residual is None else rmsnorm2d_fwd_with_add)
        or unfit_rows(x, residual, weight=weight)
        or uneven(x.shape[-1], STORED_COLUMNS)
    )


def unfit_rows(x: Tensor, residual: Tensor | None, **parameters: Tensor | None) -> Refusal | None:
    """Why these are not rows of 16 bits that AITER's kernels have registers for."""
    return (
        unlike(HALVES, x=x, residual=residual, **parameters)
        or scattered(x=x, **parameters)
        or too_wide(x.shape[-1], MAX_COLUMNS)
        or wrong_rank((x.dim(),), residual=residual)
    )


def normed_rows(function: Function, x: Tensor, *parameters: Tensor | float | None) -> Tensor:
    """function(rows of x, ...) in the shape of x."""
    if not x.numel():
        return torch.empty_like(x)
    normed: Tensor = function(dense_rows(x), *parameters)
    return normed.view(x.shape)


def normed_sum(
    function: Function,
    x: Tensor,
    residual: Tensor,
    *parameters: Tensor | float | None,
    keep_sum: bool,
    **how: bool,
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual and this sum, which a function of AITER's writes in any case."""
    flat, other = dense_rows(x), dense_rows(residual)
    out, total = torch.empty_like(flat), torch.empty_like(flat)
    if x.numel():
        function(out, flat, other, total, *parameters, **how)
    return out.view(x.shape), total.view(x.shape) if keep_sum else total.new_empty(0)


@ops.rms_norm.kernel("aiter", refuses=refuse_rms_norm, rounds="once")
def rms_norm(x: Tensor, weight: Tensor, eps: float, style: str) -> Tensor:
    if style != "one_plus" or not x.numel():
        return normed_rows(rmsnorm2d_fwd, x, weight, eps)
    flat = dense_rows(x)
    out = torch.empty_like(flat)
    rmsnorm(out, flat, weight, eps, gemma_norm=True)
    return out.view(x.shape)


@ops.add_rms_norm.kernel("aiter", refuses=refuse_rms_norm, rounds="once")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    gemma = style == "one_plus"
    return normed_sum(
        rmsnorm2d_fwd_with_add, x, residual, weight, eps, keep_sum=keep_sum, gemma_norm=gemma
    )


def without_affine(weight: Tensor | None, bias: Tensor | None) -> Refusal | None:
    if weight is None or bias is None:
        return Refusal("argument", "AITER's LayerNorm takes a weight and a bias")
    return None


def _refuse_layer_norm(
    platform: Platform,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
) -> Refusal | None:
    return (
        unfit(platform, layernorm2d_fwd if residual is None else layernorm2d_fwd_with_add)
        or without_affine(weight, bias)
        or unfit_rows(x, residual, weight=weight, bias=bias)
    )


@ops.layer_norm.kernel("aiter", refuses=_refuse_layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return normed_rows(layernorm2d_fwd, x, weight, bias, eps)


@ops.add_layer_norm.kernel("aiter", refuses=_refuse_layer_norm, rounds="once")
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    return normed_sum(layernorm2d_fwd_with_add, x, residual, weight, bias, eps, keep_sum=keep_sum)
