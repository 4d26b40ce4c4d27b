"""The quantizers of atomc.ops.quant by the name of their scheme, as fused ops apply them to their
results.

scheme                one of SCHEMES: the quantizer, which says the shapes and dtypes of results
dtype                 of fp8_*: e4m3fn or e4m3fnuz
group, column_major   of fp8_group: columns per scale, and the memory layout of the scales
rounding              of mxfp4: how its scales are rounded
"""

import torch
from torch import Tensor

from atomc.ops.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
    quant_mxfp4,
)

SCHEMES = ("fp8_static", "fp8_per_token", "fp8_group", "mxfp4", "int8_per_token")


def quantized(
    y: Tensor,
    scale: Tensor | None,
    scheme: str,
    dtype: torch.dtype,
    group: int,
    column_major: bool,
    rounding: str,
    *,
    shape_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of y [..., K] from the scheme's quantizer; for fp8_static, whose scale is
    given, the scales are empty, [0].

    shape_only: compute only the shapes, on fake tensors. Raises ValueError for an unknown scheme.
    """
    if scheme == "fp8_static":
        if scale is None:
            raise ValueError("quantization scheme 'fp8_static' needs a scale")
        static = quant_fp8_static if shape_only else quant_fp8_static.reference
        return static(y, scale, dtype), y.new_empty(0, dtype=torch.float32)
    if scheme == "fp8_per_token":
        per_token = quant_fp8_per_token if shape_only else quant_fp8_per_token.reference
        return per_token(y, dtype)
    if scheme == "fp8_group":
        by_group = quant_fp8_group if shape_only else quant_fp8_group.reference
        return by_group(y, group, column_major, dtype)
    if scheme == "mxfp4":
        return (quant_mxfp4 if shape_only else quant_mxfp4.reference)(y, rounding)
    if scheme == "int8_per_token":
        return (quant_int8_per_token if shape_only else quant_int8_per_token.reference)(y)
    raise ValueError(f"quantization scheme {scheme!r} is not one of {SCHEMES}")
