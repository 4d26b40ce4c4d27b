"""Quantized linear layers on CPUs that convert their weights to fp32: MXFP4 and NVFP4, and int8 for
those without int8 instructions. T rows, N outputs, K inputs.

Sums of up to 1,040 products of int8 codes are exact in fp32; longer ones are rounded.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, not_a_cpu
from atomc.kernels.cpu_linears import elsewhere, finish, scattered
from atomc.kernels.dequantized import multiply, mxfp4_operand, mxfp4_values, nvfp4_values
from atomc.kernels.row_views import as_rows


# Zen 4, 2560x2560, 1 row: 6 ms; the reference compiled by Inductor takes 35, the layer in fp32 2.
@ops.linear_mxfp4.kernel("onednn", refuses=first_refusal(elsewhere, scattered))
def linear_mxfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    values = mxfp4_operand(as_rows(x), None if x_scale is None else as_rows(x_scale))
    total = multiply(
        values, weight.shape[0], lambda a, b: mxfp4_values(weight[a:b], weight_scale[a:b])
    )
    return finish(total, x, None, bias, out_dtype)


@ops.linear_nvfp4.kernel("onednn", refuses=first_refusal(elsewhere, scattered))
def linear_nvfp4(
    x: Tensor, weight: Tensor, weight_scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    total = multiply(x, weight.shape[0], lambda a, b: nvfp4_values(weight[a:b], weight_scale[a:b]))
    return finish(total * global_scale.t(), x, None, bias, x.dtype)


# Zen 4, 2560x2560, 1 row: 2.9 ms. The reference compiled by Inductor, with sums in fp64, takes 33.
@ops.scaled_linear_int8.kernel("onednn", refuses=first_refusal(not_a_cpu, scattered))
def scaled_linear_int8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    total = multiply(x, weight.shape[0], lambda a, b: weight[a:b].to(torch.float32))
    return finish(total.mul_(weight_scale.t()), x, x_scale, bias, out_dtype)
