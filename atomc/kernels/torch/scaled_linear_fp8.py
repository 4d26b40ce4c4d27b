"""Linear layers in fp8 on CPUs, which have no fp8 instructions, where no glue compiler fuses the
reference.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import refuse_gpus
from atomc.kernels.cpu_linears import finish
from atomc.kernels.dequantized import fp8_values, multiply
from atomc.ops.op import PreferInductor


@ops.scaled_linear_fp8.kernel("torch", refuses=refuse_gpus, prefer_inductor=PreferInductor.ALWAYS)
def scaled_linear_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    total = multiply(x, weight.shape[0], lambda a, b: fp8_values(weight[a:b]))
    return finish(total.mul_(weight_scale.flatten()), x, x_scale, bias, out_dtype)


@ops.scaled_linear_fp8_block.kernel(
    "torch", refuses=refuse_gpus, prefer_inductor=PreferInductor.ALWAYS
)
def scaled_linear_fp8_block(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    block: int,
) -> Tensor:
    columns = weight.shape[1]
    by_column = weight_scale.repeat_interleave(block, 1)[:, :columns]

    def values(a: int, b: int) -> Tensor:
        rows_fp32 = fp8_values(weight[a:b])
        for first in range(a, b, block):
            rows_fp32[first - a : first - a + block] *= by_column[first // block]
        return rows_fp32

    scale = x_scale.repeat_interleave(block, -1)[..., :columns]
    total = multiply(x.to(torch.float32) * scale, weight.shape[0], values, block)
    return finish(total, x, None, bias, out_dtype)
