"""Sums over the processes of a group with the norm that follows and a quantized result.

`keep` and the results of a scheme are those of atomc.ops.norm_quant; process_group is the name of a
group, as in atomc.ops.collective, `group` the columns per scale.
"""

from functools import partial
from typing import Unpack

from torch import Tensor

from atomc.ops.collective import all_reduce, reduced_shape
from atomc.ops.norm import norm_op
from atomc.ops.norm_quant import add_rms_norm_quant, rms_norm_quant, rms_norm_quant_shape
from atomc.ops.op_cost import sum_of_x
from atomc.ops.op_traits import Kind
from atomc.ops.schemes import KeptScheme


def _quantized_sum_shape(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    style: str,
    residual: Tensor | None = None,
    **how: Unpack[KeptScheme],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total = reduced_shape(x, residual)
    codes, scales, y = rms_norm_quant_shape(total, weight, scale, style, **how)
    return codes, scales, total, y


_quantized_sum = partial(
    norm_op,
    kind=Kind.COLLECTIVE | Kind.NORM | Kind.QUANTIZE,
    shape=_quantized_sum_shape,
    sent=sum_of_x,
)


@_quantized_sum()
def allreduce_rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    scale: Tensor | None = None,
    style: str = "after",
    **how: Unpack[KeptScheme],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rms_norm_quant of all_reduce(x) -> codes, scales, the sum [..., D], and the norm [..., D] if
    `keep`. x [..., D], weight [D]; scale as in rms_norm_quant.
    """
    total = all_reduce.reference(x, process_group)
    codes, scales, y = rms_norm_quant.reference(total, weight, eps, scale, style, **how)
    return codes, scales, total, y


@_quantized_sum()
def allreduce_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    scale: Tensor | None = None,
    style: str = "after",
    **how: Unpack[KeptScheme],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """add_rms_norm_quant of all_reduce(x) and residual, with its results. x and residual [..., D],
    the residual the same on all processes, weight [D]; scale as in rms_norm_quant.
    """
    return add_rms_norm_quant.reference(
        all_reduce.reference(x, process_group), residual, weight, eps, scale, style, **how
    )
