"""RMSNorm of the output of a layer before it is added to the residual stream (OLMo 2, section 3.2),
alone and with the norm of the sum, which the next layer reads (Gemma 2, section 2).
"""

from torch import Tensor

from atomc.ops.norm import rms_norm
from atomc.ops.op import op
from atomc.ops.op_traits import Kind


@op(kind=Kind.NORM, rows="x")
def rms_norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str = "after"
) -> Tensor:
    """residual + rms_norm(x, weight, eps, style). x and residual [..., D], weight [D] -> [..., D]
    in the promoted dtype of the norm and the residual.
    """
    return residual + rms_norm.reference(x, weight, eps, style)


@op(kind=Kind.NORM, rows="x")
def rms_norm_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    x_weight: Tensor,
    sum_weight: Tensor,
    x_eps: float,
    sum_eps: float,
    x_style: str = "after",
    sum_style: str = "after",
    *,
    keep_sum: bool = True,
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of rms_norm_add(x, residual, x_weight, x_eps, x_style), and that sum, which is
    the next residual; without `keep_sum` it is empty, [0]. x and residual [..., D], weights [D] ->
    both [..., D], the sum in the promoted dtype of the first norm and the residual.
    """
    total = rms_norm_add.reference(x, residual, x_weight, x_eps, x_style)
    y = rms_norm.reference(total, sum_weight, sum_eps, sum_style)
    return y, total if keep_sum else total.new_empty(0)
