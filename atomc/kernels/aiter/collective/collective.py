"""Sums over processes, alone and with the norm that follows, by AITER's kernels over the links
between GPUs.

AITER has one group of its own, which the runtime makes (groups.py) or a user's init_dist_env; only
sums over that group can be its.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.collective.groups import get_tp_group
from atomc.kernels.aiter.library import Function, installed, scattered
from atomc.kernels.checks import first_refusal, named, unlike
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

tensor_model_parallel_all_reduce = Function(
    "tensor_model_parallel_all_reduce", "aiter.dist.communication_op"
)
tensor_model_parallel_fused_allreduce_rmsnorm = Function(
    "tensor_model_parallel_fused_allreduce_rmsnorm",
    "aiter.dist.communication_op",
    takes=["gemma_norm"],
)


def _foreign(platform: Platform, process_group: str) -> Refusal | None:
    """Why the group is none of AITER's."""
    if not platform.here:
        return None
    try:
        own = get_tp_group().device_group.group_name
    except Exception:  # an assertion, or what its other versions raise before init_dist_env
        return Refusal("library", "AITER's group is not set up (aiter.init_dist_env)")
    return (
        None
        if own == process_group
        else Refusal("argument", f"the sum is over group {process_group!r}, AITER's is {own!r}")
    )


@ops.all_reduce.kernel(
    "aiter",
    refuses=first_refusal(
        installed(tensor_model_parallel_all_reduce),
        named("x", unlike, FLOATS),
        _foreign,
    ),
)
def all_reduce(x: Tensor) -> Tensor:
    own = x.contiguous()
    out: Tensor = tensor_model_parallel_all_reduce(own)
    return out.clone() if out is own else out  # the sum of one process is what it was given


refuse_allreduce_add_rms_norm = first_refusal(
    installed(tensor_model_parallel_fused_allreduce_rmsnorm),
    named("x residual weight", unlike, HALVES),
    named("weight", scattered),
    _foreign,
)


@ops.allreduce_add_rms_norm.kernel("aiter", refuses=refuse_allreduce_add_rms_norm, rounds="once")
def allreduce_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, style: str
) -> tuple[Tensor, Tensor]:
    out, total = tensor_model_parallel_fused_allreduce_rmsnorm(
        x.contiguous(), residual.contiguous(), weight, eps, gemma_norm=style == "one_plus"
    )
    return out, total
