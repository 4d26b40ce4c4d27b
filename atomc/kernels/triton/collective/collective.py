"""Norms behind a sum over processes: the sum of torch.distributed, then the norm of Triton. Kernels
for few tokens are in allreduce_norm.py, which is imported first so that they are preferred.
"""

from typing import Unpack

from torch import Tensor

from atomc import ops
from atomc.kernels.triton.launch.tiles import NORM
from atomc.kernels.triton.rows.norm import add_rms_norm, refuse_rms_norm, rms_norm
from atomc.kernels.triton.rows.norm_quant import quantized_norm, refuse_rms_norm_quant
from atomc.ops.norm_quant import QuantizedNorm

all_reduce = ops.all_reduce.reference


@ops.allreduce_rms_norm.kernel("triton", refuses=refuse_rms_norm, tuned_for=NORM.archs)
def allreduce_rms_norm(
    x: Tensor, weight: Tensor, eps: float, process_group: str, style: str
) -> tuple[Tensor, Tensor]:
    total = all_reduce(x, process_group)
    return rms_norm(total, weight, eps, style), total


@ops.allreduce_add_rms_norm.kernel("triton", refuses=refuse_rms_norm, tuned_for=NORM.archs)
def allreduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, process_group: str, style: str
) -> tuple[Tensor, Tensor]:
    return add_rms_norm(all_reduce(x, process_group), residual, weight, eps, style)


@ops.allreduce_rms_norm_quant.kernel("triton", refuses=refuse_rms_norm_quant, tuned_for=NORM.archs)
def allreduce_rms_norm_quant(
    x: Tensor, process_group: str, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantized_norm(all_reduce(x, process_group), None, **norm)


@ops.allreduce_add_rms_norm_quant.kernel(
    "triton", refuses=refuse_rms_norm_quant, tuned_for=NORM.archs
)
def allreduce_add_rms_norm_quant(
    x: Tensor, residual: Tensor, process_group: str, **norm: Unpack[QuantizedNorm]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return quantized_norm(all_reduce(x, process_group), residual, **norm)
