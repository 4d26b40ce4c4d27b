"""What the processes of a group exchange: sums, alone and with the norm that follows, and gathers.

process_group: the name of one of torch.distributed. All its processes make the same calls, with
the same shapes, in the same order.
"""

from functools import partial

import torch
from torch import Tensor

from atomc.ops.norm import add_rms_norm, norm_op, normed_shape, rms_norm
from atomc.ops.op import op
from atomc.ops.op_cost import gather_of_x, sum_of_x
from atomc.ops.op_shapes import shape_of_x
from atomc.ops.op_traits import Kind


@op(kind=Kind.COLLECTIVE, rows=None, shape=shape_of_x, sent=sum_of_x)
def all_reduce(x: Tensor, process_group: str) -> Tensor:
    """The sum of x over all processes. x [...] -> [...] in x.dtype. Raises the error of
    torch.distributed for an unknown group.
    """
    summed: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", process_group)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(summed)
    return waited


@op(
    kind=Kind.COLLECTIVE,
    rows=None,
    shape=lambda x, ranks: x.new_empty((*x.shape[:-1], ranks * x.shape[-1])),
    sent=gather_of_x,
)
def all_gather(x: Tensor, ranks: int, process_group: str) -> Tensor:
    """The x of all processes side by side, in the order of their ranks. x [..., D] -> [...,
    ranks * D]; `ranks` is the number of processes of the group.
    """
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(
        x.contiguous(), ranks, process_group
    )
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(gathered)
    return torch.cat(waited.view(ranks, *x.shape).unbind(0), -1)


def reduced_shape(x: Tensor, residual: Tensor | None = None) -> Tensor:
    """An empty tensor as the sum of all_reduce(x), and of a residual."""
    total = x.new_empty(x.shape)
    return total if residual is None else total + residual


def _normed_sum_shape(
    x: Tensor, weight: Tensor, style: str, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    total = reduced_shape(x, residual)
    return normed_shape(total, weight, style), total


_normed_sum = partial(
    norm_op, kind=Kind.COLLECTIVE | Kind.NORM, shape=_normed_sum_shape, sent=sum_of_x
)


@_normed_sum()
def allreduce_rms_norm(
    x: Tensor, weight: Tensor, eps: float, process_group: str, style: str = "after"
) -> tuple[Tensor, Tensor]:
    """rms_norm(all_reduce(x)), and the sum, which is the next residual. x [..., D], weight [D] ->
    both [..., D].
    """
    total = all_reduce.reference(x, process_group)
    return rms_norm.reference(total, weight, eps, style), total


@_normed_sum()
def allreduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    process_group: str,
    style: str = "after",
) -> tuple[Tensor, Tensor]:
    """add_rms_norm(all_reduce(x), residual): the norm and the sum. x [..., D], residual [..., D]
    (the same on all processes), weight [D] -> both [..., D].
    """
    return add_rms_norm.reference(
        all_reduce.reference(x, process_group), residual, weight, eps, style
    )
