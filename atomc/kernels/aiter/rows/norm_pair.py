"""Two norms of the same rows in one HIP kernel of AITER's, the first of which may be quantized: fp8
per token and in groups, MXFP4 with scales rounded up (the latents of DeepSeek's queries and keys).

Both stay in fp32 until they are rounded or quantized. Rows may be parts of wider ones.
"""

from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import same_sizes
from atomc.kernels.aiter.library import Function, installed
from atomc.kernels.aiter.linear.packing import e2m1_view
from atomc.kernels.aiter.rows.norm import STORED_COLUMNS, unfit_rows
from atomc.kernels.aiter.rows.norm_quant import (
    STORED_CODES,
    UNSERVED,
    empty_outputs,
    unfit_codes,
)
from atomc.kernels.checks import first_refusal, uneven
from atomc.kernels.row_views import as_rows, with_lead
from atomc.ops.op import Refusal
from atomc.ops.schemes import SchemeArguments
from atomc.platform import Platform

fused_qk_rmsnorm_group_quant = Function(
    "fused_qk_rmsnorm_group_quant",
    "aiter",
    takes=["q_out_unquantized", "k_out", "group_size", "transpose_scale", "gemma_norm"],
)
fused_qk_rmsnorm_per_token_quant = Function(
    "fused_qk_rmsnorm_per_token_quant", "aiter", takes=["q_out_unquantized", "k_out", "gemma_norm"]
)


def _unfit_pair(x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor) -> Refusal | None:
    if not same_sizes(x.shape[:-1], y.shape[:-1]):
        return Refusal("shape", "the two norms have other rows")
    return (
        unfit_rows(x, None, y=y, x_weight=x_weight, y_weight=y_weight)
        or unfit_rows(y, None)
        or uneven(x.shape[-1], STORED_COLUMNS)
        or uneven(y.shape[-1], STORED_COLUMNS)
    )


@ops.rms_norm_pair.kernel(
    "aiter",
    refuses=first_refusal(installed(fused_qk_rmsnorm_group_quant), _unfit_pair),
    rounds="once",
)
def rms_norm_pair(
    x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float, style: str
) -> tuple[Tensor, Tensor]:
    results = _empty_norm(x), _empty_norm(y)
    if x.numel():
        _norm_pair(fused_qk_rmsnorm_group_quant, x, y, x_weight, y_weight, eps, style, *results)
    return results


def _empty_norm(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _norm_pair(
    function: partial[None] | Function,
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    eps: float,
    style: str,
    x_norm: Tensor | None,
    y_norm: Tensor,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Into x_norm, y_norm, codes and scales."""
    function(
        codes,
        scales,
        as_rows(x),
        x_weight,
        eps,
        None if x_norm is None else as_rows(x_norm),
        as_rows(y_norm),
        None,
        as_rows(y),
        y_weight,
        eps,
        None,
        gemma_norm=style == "one_plus",
    )


def _unquantized(
    platform: Platform,
    x: Tensor,
    quantize_y: bool,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    rounding: str,
) -> Refusal | None:
    if quantize_y:
        return Refusal("argument", "AITER's kernel quantizes one of the two norms")
    if scheme in UNSERVED:
        return Refusal("argument", f"AITER's compiled kernel {UNSERVED[scheme]}")
    return uneven(x.shape[-1], STORED_CODES) or unfit_codes(
        platform, x, scheme, dtype, group, rounding
    )


@ops.rms_norm_pair_quant.kernel(
    "aiter",
    refuses=first_refusal(
        installed(fused_qk_rmsnorm_group_quant, fused_qk_rmsnorm_per_token_quant),
        _unquantized,
        _unfit_pair,
    ),
    rounds="once",
)
def rms_norm_pair_quant(
    x: Tensor,
    y: Tensor,
    x_weight: Tensor,
    y_weight: Tensor,
    eps: float,
    style: str,
    keep_x: bool,
    **how: Unpack[SchemeArguments],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    scheme, none = how["scheme"], y.new_empty(0)
    by_column = how["column_major"] and scheme == "fp8_group"
    codes, scales, size = empty_outputs(as_rows(x), scheme, how["dtype"], how["group"], by_column)
    if by_column:
        scales = scales.t()
    x_norm, y_norm = _empty_norm(x) if keep_x else None, _empty_norm(y)
    if x.numel():
        function = (
            partial(fused_qk_rmsnorm_group_quant, group_size=size, transpose_scale=by_column)
            if size
            else fused_qk_rmsnorm_per_token_quant
        )
        codes_out = e2m1_view(codes) if scheme == "mxfp4" else codes
        norms = x, y, x_weight, y_weight, eps, style, x_norm, y_norm
        _norm_pair(function, *norms, codes_out, scales)
    x_norm = none if x_norm is None else x_norm
    return with_lead(codes, x), with_lead(scales, x), none, y.new_empty(0), x_norm, y_norm
