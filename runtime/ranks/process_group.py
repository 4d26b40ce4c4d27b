"""The process group of torch.distributed that ranks join."""

import logging
import os
import socket
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import ProcessGroup

from atomc.errors import first_line
from atomc.kernels.aiter.collective import groups as aiter_groups
from atomc.kernels.mori import exchange as mori_exchange
from atomc.options import Options
from atomc.parallel.process_group import PipelineStage, Place, TensorParallel
from atomc.runtime.config import EngineConfig
from atomc.torch_compat import peer_memory

log = logging.getLogger("atomc")

LOCALHOST = "127.0.0.1"
# A rank may compile for long while another waits for it. The monitor ends ranks that hang.
TIMEOUT = timedelta(days=1)
ABORT_SECONDS = 10.0
# By default, torch ends the process after an error of a collective, or of the device, and when its
# own thread that watches collectives makes no progress. Here the monitor decides, and rank 0 may be
# a user's program. Sends between stages share a stream, in the same order on all ranks: no warning.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


def create_store(size: int, host: str | None) -> TCPStore:
    """A store on a free port of this address; None: that only this host can reach."""
    host = host or LOCALHOST
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, size: int) -> TCPStore:
    return TCPStore(host, port, size, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def open_device(device: torch.device) -> None:
    """Create the context of this GPU, and make it that of this thread; nothing for a CPU. Raises
    the error of torch: a rank calls this before others wait for it in `join`, which no error ends.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_device(device)


def join(store: Store, rank: int, device: torch.device, config: EngineConfig) -> Place:
    """Create the default process group, of pp stages with tp ranks each, or of as many data ranks,
    which share experts; returns when all ranks have joined.
    """
    tp, pp = config.tp, config.pp
    on_gpu = device.type == "cuda"
    if on_gpu:
        open_device(device)
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=config.num_ranks,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    index, part = divmod(rank, tp)
    stage = None if pp == 1 else PipelineStage(index, tuple(range(part, pp * tp, tp)))
    experts = _experts_place(config)
    if tp == 1:
        return Place(stage=stage, experts=experts)
    group, is_of_aiter = _stage_group(config, device)
    peer_memory.share(group, device)
    capturing = aiter_groups.capturing if is_of_aiter else nullcontext
    return Place(TensorParallel.of(group), stage, experts, capturing)


def _experts_place(config: EngineConfig) -> TensorParallel | None:
    """The place of this rank among those of all data ranks that send each other tokens: of each,
    the one with the same part of the layers.
    """
    if config.data_ranks == 1:
        return None
    tp, size = config.tp, config.num_ranks
    groups = [distributed.group.WORLD]
    if tp > 1:
        groups = [
            distributed.new_group(list(range(part, size, tp)), timeout=TIMEOUT)
            for part in range(tp)
        ]
    group = groups[distributed.get_rank() % tp]
    assert group is not None
    if _on_rocm() and _is_wanted("mori", config):
        mori_exchange.connect(group)
    return TensorParallel.of(group)


def _stage_group(config: EngineConfig, device: torch.device) -> tuple[ProcessGroup, bool]:
    """The group of this rank's stage or data rank, and whether it is AITER's, as where it is
    installed and wanted, so that sums can be its. All ranks call this, since they create the groups
    of all.
    """
    tp, pp = config.tp, config.pp * config.data_ranks
    if _on_rocm() and _is_wanted("aiter", config):
        of_aiter = aiter_groups.stage_group(tp, pp, device.index or 0)
        if of_aiter is not None:
            return of_aiter, True
    groups = [distributed.group.WORLD]
    if pp > 1:
        groups = [
            distributed.new_group(list(range(first, first + tp)), timeout=TIMEOUT)
            for first in range(0, pp * tp, tp)
        ]
    group = groups[distributed.get_rank() // tp]
    assert group is not None
    return group, False


def _is_wanted(provider: str, config: EngineConfig) -> bool:
    return provider in (Options.of(config.options).providers or (provider,))


def _on_rocm() -> bool:
    """Whether the ranks are GPUs of AMD, whose NCCL is RCCL."""
    return torch.version.hip is not None and distributed.get_backend() == "nccl"


def abort_collectives() -> list[threading.Thread]:
    """Let collectives that wait for a dead rank end: those of NCCL in a thread for each group,
    which ends when no CUDA graph has them; those of gloo end without it.
    """
    try:
        peer_memory.abort()
    except RuntimeError as error:  # the device has failed: its kernels do not wait any more
        log.error("waiting for memory of peers was not ended: %s", first_line(error))
    if not distributed.is_initialized() or distributed.get_backend() != "nccl":
        return []
    threads = [
        threading.Thread(target=group.abort, name="abort", daemon=True)
        for group in distributed.distributed_c10d._world.pg_names
        if distributed.get_backend(group) == "nccl"  # AITER has one of gloo beside each
    ]
    for thread in threads:
        thread.start()
    return threads


def leave() -> None:
    """Destroy the process group, without its other ranks. No CUDA graph may have its collectives
    any more.
    """
    if not distributed.is_initialized():
        return
    until = time.monotonic() + ABORT_SECONDS
    threads = abort_collectives()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        log.error(
            "NCCL did not end within %g s: this process can have no other group", ABORT_SECONDS
        )
        return
    peer_memory.forget()
    if _on_rocm():
        mori_exchange.disconnect()
        aiter_groups.leave()
    if distributed.is_initialized():
        distributed.destroy_process_group()
