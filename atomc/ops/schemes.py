"""One quantizer by the name of its scheme: what fused ops do to their result before they write it.

scheme                one of SCHEMES; the others of these say more about one scheme each
dtype                 fp8_*: e4m3fn or e4m3fnuz
group, column_major   fp8_group: columns that share a scale, and how the scales lie
rounding              mxfp4: how its scales are rounded
"""

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
    """(codes, scales) of y [..., K] as the scheme's quantizer gives them; of fp8_static, which has
    its scale, no scales.

    shape_only: on fake tensors, by the quantizers' shape rules. Raises ValueError for an unknown
    scheme.
    """
    if scheme == "fp8_static":
        if scale is None:
            raise ValueError("quantization scheme 'fp8_static' needs a scale")
        static = quant_fp8_static if shape_only else quant_fp8_static.reference
        return static(y, scale, dtype), y.new_empty(0, dtype=torch.float32)
    quantizers: dict[str, tuple[OpFunction[..., tuple[Tensor, Tensor]], tuple[object, ...]]] = {
        "fp8_per_token": (quant_fp8_per_token, (dtype,)),
        "fp8_group": (quant_fp8_group, (group, column_major, dtype)),
        "mxfp4": (quant_mxfp4, (rounding,)),
        "int8_per_token": (quant_int8_per_token, ()),
    }
    if scheme not in quantizers:
        raise ValueError(f"quantization scheme {scheme!r} is not one of {SCHEMES}")
    op, attributes = quantizers[scheme]
    codes, scales = (op if shape_only else op.reference)(y, *attributes)
    return codes, scales
