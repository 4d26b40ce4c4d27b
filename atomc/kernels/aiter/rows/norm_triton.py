"""Norms by AITER's Triton kernels: where its compiled ones are missing or refuse, and with columns
of zeros behind.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, scattered, unfit
from atomc.kernels.aiter.rows.norm import normed_rows, normed_sum, without_affine
from atomc.kernels.checks import unlike, wrong_rank
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

triton_rms_norm = Function(
    "rms_norm", "aiter.ops.triton.normalization.rmsnorm", "aiter.ops.triton.rmsnorm"
)
fused_add_rmsnorm_pad = Function(
    "fused_add_rmsnorm_pad",
    "aiter.ops.triton.normalization.fused_add_rmsnorm_pad",
    "aiter.ops.triton.fused_add_rmsnorm_pad",
)
triton_layer_norm = Function(
    "layer_norm", "aiter.ops.triton.normalization.norm", "aiter.ops.triton.norm"
)
triton_layer_norm_with_add = Function(
    "layernorm2d_fwd_with_add", "aiter.ops.triton.normalization.norm", "aiter.ops.triton.norm"
)


def unreadable(
    x: Tensor, residual: Tensor | None = None, weight: Tensor | None = None, style: str = "before"
) -> Refusal | None:
    """Why AITER's Triton norms cannot be had of these rows, or None."""
    if reason := (
        unlike(FLOATS, x=x, residual=residual)
        or scattered(x=x, weight=weight)
        or wrong_rank((x.dim(),), residual=residual)
    ):
        return reason
    if style == "one_plus":
        return Refusal("argument", "AITER's Triton norms multiply by the weight, not by 1 + weight")
    if (
        style == "after"
        and weight is not None
        and torch.promote_types(x.dtype, weight.dtype) != x.dtype
    ):
        return Refusal("dtype", f"the weight is {weight.dtype}, and AITER's norm stays {x.dtype}")
    return None


def _refuse_rms_norm(
    platform: Platform, x: Tensor, weight: Tensor, style: str, residual: Tensor | None = None
) -> Refusal | None:
    function = triton_rms_norm if residual is None else fused_add_rmsnorm_pad
    return unfit(platform, function) or unreadable(x, residual, weight, style)


@ops.rms_norm.kernel("aiter", refuses=_refuse_rms_norm, rounds="once")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normed_rows(triton_rms_norm, x, weight, eps)


@ops.add_rms_norm.kernel("aiter", refuses=_refuse_rms_norm, rounds="once")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, keep_sum: bool
) -> tuple[Tensor, Tensor]:
    out, total = add_rms_norm_pad(x, residual, weight, eps, 0)
    return out, total if keep_sum else total.new_empty(0)


@ops.add_rms_norm_pad.kernel("aiter", refuses=_refuse_rms_norm, rounds="once")
def add_rms_norm_pad(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] + columns
    if not x.numel():
        return x.new_empty((*x.shape[:-1], width)), torch.empty_like(x)
    # The next multiple of a number that is larger than the row is that number.
    out, total = fused_add_rmsnorm_pad(
        as_rows(x), weight, eps, as_rows(residual), x_pad_to_multiple=width if columns else 0
    )
    return with_lead(out, x), total.view(x.shape)


def _refuse_layer_norm(
    platform: Platform,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
) -> Refusal | None:
    return (
        unfit(platform, triton_layer_norm if residual is None else triton_layer_norm_with_add)
        or without_affine(weight, bias)
        or unreadable(x, residual)
        or scattered(weight=weight, bias=bias)
    )


@ops.layer_norm.kernel("aiter", refuses=_refuse_layer_norm)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return normed_rows(triton_layer_norm, x, weight, bias, eps)


@ops.add_layer_norm.kernel("aiter", refuses=_refuse_layer_norm, rounds="once")
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    keep_sum: bool,
) -> tuple[Tensor, Tensor]:
    return normed_sum(triton_layer_norm_with_add, x, residual, weight, bias, eps, keep_sum=keep_sum)
