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
    platform: Platform, x: Tensor, weight: Tensor, style: str, **_: object
) -> Refusal | None:
    if reason := unfit(platform, rmsnorm if style == "one_plus" else rmsnorm2d_fwd):
        return reason
    return _rows(x=x, weight=weight) or uneven(x.shape[-1], STORED_COLUMNS)


def _refuse_add_rms_norm(
    platform: Platform, x: Tensor, residual: Tensor, weight: Tensor, **_: object
) -> Refusal | None:
    return (
        unfit(platform, rmsnorm2d_fwd_with_add)
        or _rows(x=x, residual=residual, weight=weight)
        or uneven(x.shape[-1], STORED_COLUMNS)
    )


def _rows(x: Tensor, residual: Tensor | None = None, **parameters: Tensor | None) -> Refusal | None:
    """Why these are not rows of 16 bits that AITER's kernels have registers for."""
    return (
        unlike(HALVES, x=x, residual=residual, **parameters)
        or scattered(x=x, residual=residual)
        or too_wide(x.shape[-1], MAX_COLUMNS)
        or wrong_rank((x.dim(),), residual=residual)
    )


@ops.rms_norm.kernel("aiter", refuses=refuse_rms_norm, rounds="once")
def rms_norm(x: Tensor, weight: Tensor, eps: float, style: str = "after") -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    flat = dense_rows(x)
    if style == "one_plus":
        out = torch.empty_like(flat)
        rmsnorm(out, flat, weight, eps, gemma_norm=True)
        return out.view(x.shape)
    normed: Tensor = rmsnorm2d_fwd(flat, weight, eps)
    return normed.view(x.shape)


@ops.add_rms_norm.kernel("aiter", refuses=_refuse_add_rms_norm, rounds="once")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str = "after"
) -> tuple[Tensor, Tensor]:
    flat, other = dense_rows(x), dense_rows(residual)
    out, total = torch.empty_like(flat), torch.empty_like(flat)
    if not x.numel():
        return out.view(x.shape), total.view(x.shape)
    rmsnorm2d_fwd_with_add(out, flat, other, total, weight, eps, gemma_norm=style == "one_plus")
    return out.view(x.shape), total.view(x.shape)


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
    **_: object,
) -> Refusal | None:
    return (
        unfit(platform, layernorm2d_fwd if residual is None else layernorm2d_fwd_with_add)
        or without_affine(weight, bias)
        or _rows(x, residual, weight=weight, bias=bias)
    )


@ops.layer_norm.kernel("aiter", refuses=_refuse_layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not x.numel():
        return torch.empty_like(x)
    normed: Tensor = layernorm2d_fwd(dense_rows(x), weight, bias, eps)
    return normed.view(x.shape)


@ops.add_layer_norm.kernel("aiter", refuses=_refuse_layer_norm, rounds="once")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    flat, other = dense_rows(x), dense_rows(residual)
    out, total = torch.empty_like(flat), torch.empty_like(flat)
    if x.numel():
        layernorm2d_fwd_with_add(out, flat, other, total, weight, bias, eps)
    return out.view(x.shape), total.view(x.shape)
