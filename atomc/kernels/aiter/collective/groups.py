"""AITER's groups of processes, over the default group of torch.distributed.

AITER sums over a group of its own, which it makes with a name of its own: a sum can be AITER's if
the ranks are in that group. Its layout is atomc's: the ranks of a stage are neighbours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from atomc.kernels.aiter.library import Function

_STATE = "aiter.dist.parallel_state"
get_tp_group = Function("get_tp_group", _STATE)
init_distributed_environment = Function(
    "init_distributed_environment", _STATE, takes=["rank", "local_rank", "backend"]
)
ensure_model_parallel_initialized = Function(
    "ensure_model_parallel_initialized", _STATE, takes=["backend"]
)
GraphCaptureContext = Function("GraphCaptureContext", _STATE)
destroy_model_parallel = Function("destroy_model_parallel", _STATE)
destroy_distributed_environment = Function("destroy_distributed_environment", _STATE)
# Of versions from April 2026 on.
IPCBufferPool = Function("IPCBufferPool", "aiter.dist.device_communicators.custom_all_reduce")

FUNCTIONS = (
    get_tp_group,
    init_distributed_environment,
    ensure_model_parallel_initialized,
    GraphCaptureContext,
    destroy_model_parallel,
    destroy_distributed_environment,
)


def _are_missing() -> bool:
    return any(isinstance(function.found, str) for function in FUNCTIONS)


def stage_group(tp: int, pp: int, local_rank: int) -> ProcessGroup | None:
    """The group of the tp ranks of this rank's stage, made by AITER, which allocates the buffers of
    its sums; None if it is not installed. All ranks of the default group call it. local_rank: the
    number of this rank's GPU.
    """
    if _are_missing():
        return None
    backend = distributed.get_backend()
    pool: Any = IPCBufferPool.found
    if not isinstance(pool, str):
        # Its keys in the store of the group count the pools of a process: one that has been in a
        # group before would wait for keys that new processes never set.
        pool._pool_seq = 0
    # AITER takes the default group as it is, with its store.
    init_distributed_environment(
        distributed.get_world_size(),
        distributed.get_rank(),
        local_rank=local_rank,
        backend=backend,
    )
    ensure_model_parallel_initialized(tp, pp, backend=backend)
    group: ProcessGroup = get_tp_group().device_group
    return group


def reads_peers() -> bool:
    """Whether AITER's kernels read the memory of all GPUs of its group, which is set up. Of 6 GPUs
    only its sum does, without a norm.
    """
    group = get_tp_group()
    peers = getattr(getattr(group, "device_communicator", None), "ca_comm", None)
    return peers is not None and not peers.disabled and group.world_size != 6


@contextmanager
def capturing() -> Iterator[None]:
    """Around a capture of a CUDA graph on the current stream, by all ranks of the stage: its sums
    read the tensors of other ranks where they are. In other captures AITER copies them before. In
    here nothing else may run: outside of a capture AITER gives zeros instead of a sum.
    """
    with get_tp_group().graph_capture(GraphCaptureContext(torch.cuda.current_stream())):
        yield


def leave() -> None:
    """Destroy AITER's groups, its buffers and the default group, so that another can be joined."""
    if not _are_missing():
        destroy_model_parallel()
        destroy_distributed_environment()
