"""Sums over processes with the norm that follows and a quantized result: AITER's kernel for the sum
and the norm, then its quantizer.
"""

from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.collective.collective import (
    allreduce_add_rms_norm,
    refuse_allreduce_add_rms_norm,
)
from atomc.kernels.aiter.rows import quant
from atomc.kernels.checks import first_refusal
from atomc.ops.norm_quant import QuantizedNorm
from atomc.ops.op import Refusal

QUANTIZERS = {
    "fp8_static": quant.refuse_static,
    "fp8_per_token": quant.refuse_per_token,
    "fp8_group": quant.refuse_group,
    "mxfp4": quant.refuse_mxfp4,
}


def _refuse_quantizer(scheme: str, scale: Tensor | None, **arguments: object) -> Refusal | None:
    if scheme in QUANTIZERS and (scheme != "fp8_static" or scale is not None):
        return QUANTIZERS[scheme](**arguments)
    return Refusal(
        "argument", "AITER's compiled quantizer truncates to int8, where the op rounds to nearest"
    )


@ops.allreduce_add_rms_norm_quant.kernel(
    "aiter",
    refuses=first_refusal(refuse_allreduce_add_rms_norm, _refuse_quantizer),
    rounds="once",
)
def allreduce_add_rms_norm_quant(
    x: Tensor, residual: Tensor, process_group: str, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scheme, scale, dtype = norm["scheme"], norm["scale"], norm["dtype"]
    y, total = allreduce_add_rms_norm(
        x, residual, norm["weight"], norm["eps"], process_group, norm["style"]
    )
    if scheme == "fp8_static":
        assert scale is not None
        codes, scales = quant.quant_fp8_static(y, scale, dtype), x.new_empty(0, dtype=torch.float32)
    elif scheme == "fp8_per_token":
        codes, scales = quant.quant_fp8_per_token(y, dtype)
    elif scheme == "fp8_group":
        codes, scales = quant.quant_fp8_group(y, norm["group"], norm["column_major"], dtype)
    else:
        codes, scales = quant.quant_mxfp4(y, norm["rounding"])
    return codes, scales, total, y if norm["keep"] else y.new_empty(0)
