"""Linear layers with NVFP4 weights on CPUs: the weight is converted to fp32."""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.cpu_linears import elsewhere, finish, scattered
from atomc.kernels.dequantized import multiply, nvfp4_values
from atomc.ops.op import Refusal
from atomc.platform import Platform


def refuse_linear_nvfp4(platform: Platform, weight: Tensor, **_: object) -> Refusal | None:
    return elsewhere(platform) or scattered(weight)


@ops.linear_nvfp4.kernel("onednn", refuses=refuse_linear_nvfp4)
def linear_nvfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    total = multiply(
        rows, weight.shape[0], lambda a, b: nvfp4_values(weight[a:b], weight_scale[a:b])
    )
    return finish(total * global_scale.t(), x, None, bias, x.dtype)
