"""Linear layers with MXFP4 weights on CPUs: both operands are converted to fp32. T rows, N outputs,
K inputs.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.cpu_linears import elsewhere, finish, scattered
from atomc.kernels.dequantized import fp8_values, multiply, mxfp4_values
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_linear_mxfp4(platform: Platform, weight: Tensor, **_: object) -> Refusal | None:
    return elsewhere(platform) or scattered(weight)


# Zen 4, 2560x2560, 1 row: 6 ms; the reference compiled by Inductor takes 35, the layer in fp32 2.
@ops.linear_mxfp4.kernel("onednn", refuses=refuse_linear_mxfp4)
def linear_mxfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if x.dtype == torch.uint8:
        assert x_scale is not None
        values = mxfp4_values(rows, x_scale.reshape(-1, x_scale.shape[-1]))
    else:
        values = rows.to(torch.float32) if x.dtype.itemsize > 1 else fp8_values(rows)
        if x_scale is not None:
            values = values * x_scale.reshape(-1, 1)
    total = multiply(
        values, weight.shape[0], lambda a, b: mxfp4_values(weight[a:b], weight_scale[a:b])
    )
    return finish(total, x, None, bias, out_dtype)
