"""The quantizers of atomc.ops.quant by the name of their scheme, as fused ops apply them to their
results.

scheme                one of SCHEMES: the quantizer, which says the shapes and dtypes of results
dtype                 of fp8_*: e4m3fn or e4m3fnuz
group, column_major   of fp8_group: columns per scale, and the memory layout of the scales
rounding              of mxfp4: how its scales are rounded
"""

from typing import Annotated, TypedDict

import torch
from torch import Tensor

from atomc.ops.op import OpFunction
from atomc.ops.quant import (
    quant_fp8_group,
    quant_fp8_per_token,
    quant_fp8_static,
    quant_int8_per_token,
    quant_mxfp4,
)

SCHEMES = ("fp8_static", "fp8_per_token", "fp8_group", "mxfp4", "int8_per_token")


class Scheme(TypedDict):
    """The name of a scheme, as an argument of fused ops."""

    scheme: str


class Attributes(TypedDict, total=False):
    """The attributes of a scheme, named as arguments of fused ops."""

    dtype: Annotated[torch.dtype, torch.float8_e4m3fn]
    group: Annotated[int, 128]
    column_major: Annotated[bool, False]
    rounding: Annotated[str, "even"]


class SchemeArguments(Scheme, Attributes):
    """A scheme and its attributes, as arguments of fused ops."""


class KeptScheme(SchemeArguments, total=False):
    """The same of an op that returns what it quantizes, too, if `keep`."""

    keep: Annotated[bool, False]


def quantized(
    y: Tensor,
    scale: Tensor | None,
    scheme: str,
    dtype: torch.dtype = torch.float8_e4m3fn,
    group: int = 128,
    column_major: bool = False,
    rounding: str = "even",
    *,
    shape_only: bool = False,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of y [..., K] from the scheme's quantizer; for fp8_static, whose scale is
    given, the scales are empty, [0].

    shape_only: compute only the shapes, on fake tensors. Raises ValueError for an unknown scheme.
    """
    quantizers: dict[str, tuple[OpFunction[..., Tensor | tuple[Tensor, Tensor]], list[object]]] = {
        "fp8_static": (quant_fp8_static, [scale, dtype]),
        "fp8_per_token": (quant_fp8_per_token, [dtype]),
        "fp8_group": (quant_fp8_group, [group, column_major, dtype]),
        "mxfp4": (quant_mxfp4, [rounding]),
        "int8_per_token": (quant_int8_per_token, []),
    }
    if scheme not in quantizers:
        raise ValueError(f"quantization scheme {scheme!r} is not one of {SCHEMES}")
    if scheme == "fp8_static" and scale is None:
        raise ValueError("quantization scheme 'fp8_static' needs a scale")
    op, attributes = quantizers[scheme]
    results = (op if shape_only else op.reference)(y, *attributes)
    return results if isinstance(results, tuple) else (results, y.new_empty(0, dtype=torch.float32))
