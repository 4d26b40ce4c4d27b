"""Sums over the processes of a group, alone and with the norm that follows.

group: the name of a process group of torch.distributed. All its processes make the same calls, with
the same shapes, in the same order.
"""

import torch
from torch import Tensor

from atomc.ops.norm import add_rms_norm, rms_norm, rounds_once
from atomc.ops.op import op
from atomc.ops.op_traits import Kind


def _all_reduce_shape(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@op(kind=Kind.COLLECTIVE, rows=None, shape=_all_reduce_shape)
def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of x over all processes. x [...] -> [...] in x.dtype. Raises the error of
    torch.distributed for an unknown group.
    """
    summed: Tensor = torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group)
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(summed)
    return waited


def _allreduce_rms_norm_shape(
    x: Tensor, weight: Tensor, eps: float, group: str, style: str = "after"
) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.result_type(x, weight) if style == "after" else x.dtype)


@op(
    kind=Kind.COLLECTIVE | Kind.NORM,
    rows="x",
    rounds_once=rounds_once,
    shape=_allreduce_rms_norm_shape,
)
def allreduce_rms_norm(
    x: Tensor, weight: Tensor, eps: float, group: str, style: str = "after"
) -> Tensor:
    """rms_norm(all_reduce(x)). x [..., D], weight [D] -> [..., D]."""
    return rms_norm.reference(all_reduce.reference(x, group), weight, eps, style)


def _allreduce_add_rms_norm_shape(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str, style: str = "after"
) -> tuple[Tensor, Tensor]:
    total = x.new_empty(x.shape) + residual
    return torch.empty_like(
        total, dtype=torch.result_type(x, weight) if style == "after" else x.dtype
    ), total


@op(
    kind=Kind.COLLECTIVE | Kind.NORM,
    rows="x",
    rounds_once=rounds_once,
    shape=_allreduce_add_rms_norm_shape,
)
def allreduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: str, style: str = "after"
) -> tuple[Tensor, Tensor]:
    """add_rms_norm(all_reduce(x), residual): the norm and the sum. x [..., D], residual [..., D]
    (the same on all processes), weight [D] -> both [..., D].
    """
    return add_rms_norm.reference(all_reduce.reference(x, group), residual, weight, eps, style)
