"""A norm with padded rows, for expert kernels that require whole tiles."""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.norm import add_rms_norm, norm_op
from atomc.ops.op_traits import Kind


def _add_rms_norm_pad_shape(
    x: Tensor, weight: Tensor, columns: int, style: str
) -> tuple[Tensor, Tensor]:
    dtype = torch.result_type(x, weight) if style == "after" else x.dtype
    return x.new_empty((*x.shape[:-1], x.shape[-1] + columns), dtype=dtype), torch.empty_like(x)


@norm_op(kind=Kind.NORM, shape=_add_rms_norm_pad_shape)
def add_rms_norm_pad(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int, style: str = "after"
) -> tuple[Tensor, Tensor]:
    """add_rms_norm with the norm padded by `columns` zeros: x and residual [..., D], weight [D] ->
    the norm [..., D + columns], and the sum [..., D].
    """
    y, total = add_rms_norm.reference(x, residual, weight, eps, style)
    return F.pad(y, (0, columns)), total
