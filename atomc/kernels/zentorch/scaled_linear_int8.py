"""Linear layers in int8 by zentorch: exact sums, scaled in fp32. T rows, K inputs, N outputs."""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal
from atomc.kernels.cpu_linears import finish, unlike_int8
from atomc.kernels.row_views import as_rows
from atomc.kernels.zentorch.library import function, unfit, unpacked
from atomc.ops.op import Prepared, Refusal
from atomc.platform import Platform


def _scales(weight_scale: Tensor) -> Prepared:
    """One scale per output; and a scale of 1 and zero points of 0 for x, whose scales are applied
    afterwards.
    """
    count = weight_scale.numel()
    zeros = torch.zeros(count, dtype=torch.int32)
    return Prepared(
        (weight_scale.detach().reshape(count).contiguous(), torch.ones(1), zeros[:1].clone(), zeros)
    )


def _refuse_cpu(platform: Platform, out_dtype: torch.dtype) -> Refusal | None:
    return unfit(platform, "int8", needs_bf16=out_dtype != torch.float32)


@ops.scaled_linear_int8.kernel(
    "zentorch",
    refuses=first_refusal(unlike_int8, _refuse_cpu),
    prepare={"weight": unpacked, "weight_scale": _scales},
    keeps_original=True,
)
def scaled_linear_int8(
    x: Tensor,
    weight: tuple[Tensor],
    x_scale: Tensor,
    weight_scale: tuple[Tensor, Tensor, Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    scale, one, zero, zeros = weight_scale
    rows = as_rows(x)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight[0].shape[0]), dtype=out_dtype)
    total = function("zentorch_qlinear")(
        rows, weight[0], one, zero, scale, zeros, None, None, None, torch.float32
    )
    return finish(total, x, x_scale, bias, out_dtype)
