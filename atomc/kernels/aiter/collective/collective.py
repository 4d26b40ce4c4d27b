"""Sums over processes, alone and with the norm that follows, and gathers, by AITER's kernels over
the links between GPUs.

AITER has one group of its own, which the runtime makes (groups.py) or a user's init_dist_env; only
collectives of that group can be its.
"""

from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.collective.groups import get_tp_group, reads_peers
from atomc.kernels.aiter.library import Function, installed, scattered
from atomc.kernels.checks import first_refusal, named, uneven, unlike
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

tensor_model_parallel_all_reduce = Function(
    "tensor_model_parallel_all_reduce", "aiter.dist.communication_op"
)
tensor_model_parallel_all_gather = Function(
    "tensor_model_parallel_all_gather", "aiter.dist.communication_op", takes=["use_custom"]
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
        else Refusal("argument", f"the ranks are group {process_group!r}, AITER's is {own!r}")
    )


def refuse_other_gpus(platform: Platform) -> Refusal | None:
    """Other GPUs than AITER's kernels read the memory of."""
    if platform.here and not reads_peers():
        return Refusal("library", "AITER's kernel is for 2, 4 or 8 GPUs of one host")
    return None


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


@ops.all_gather.kernel(
    "aiter",
    refuses=first_refusal(
        installed(tensor_model_parallel_all_gather),
        named("x", unlike, FLOATS),
        _foreign,
        refuse_other_gpus,
    ),
)
def all_gather(x: Tensor) -> Tensor:
    out: Tensor = tensor_model_parallel_all_gather(x.contiguous(), use_custom=True)
    return out


# Of rows, AITER's kernels read 8 columns at once; those for many rows raise for less than 512.
PACK_COLUMNS, NARROWEST = 8, 512


def _refuse_width(weight: Tensor) -> Refusal | None:
    width = weight.shape[-1]
    if width < NARROWEST:
        return Refusal("shape", f"rows of {width}: AITER's sum takes rows of {NARROWEST} and more")
    return uneven(width, PACK_COLUMNS)


refuse_allreduce_add_rms_norm = first_refusal(
    installed(tensor_model_parallel_fused_allreduce_rmsnorm),
    named("x residual weight", unlike, HALVES),
    named("weight", scattered),
    _refuse_width,
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
