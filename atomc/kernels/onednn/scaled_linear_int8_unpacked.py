"""Linear layers in int8 by oneDNN with the unpacked weight: for one row, and for weights that
cannot be prepared.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.cpu_linears import finish
from atomc.kernels.onednn.scaled_linear_int8 import refuse_scaled_linear_int8
from atomc.kernels.row_views import as_rows


@ops.scaled_linear_int8.kernel("onednn", refuses=refuse_scaled_linear_int8)
def scaled_linear_int8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    total = torch._int_mm(as_rows(x), weight.t()).to(torch.float32).mul_(weight_scale.t())
    return finish(total, x, x_scale, bias, out_dtype)
