"""The process group of torch.distributed that ranks on one host join."""

import os
import socket
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore

from atomc.parallel.group import TensorParallel

LOCALHOST = "127.0.0.1"
# A rank may compile for long while another waits for it. The monitor ends ranks that hang.
TIMEOUT = timedelta(days=1)


def create_store(size: int) -> TCPStore:
    """A store on a free port that only this host can reach."""
    listener = socket.create_server((LOCALHOST, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOCALHOST,
        port,
        size,
        is_master=True,
        wait_for_workers=False,
        timeout=TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def connect_store(port: int, size: int) -> TCPStore:
    return TCPStore(LOCALHOST, port, size, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


def join(store: Store, rank: int, size: int, device: torch.device) -> TensorParallel:
    """Create the default process group; returns when all ranks have joined."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        # By default, torch ends the process when a collective fails: the monitor decides that.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    group = distributed.group.WORLD
    assert group is not None
    return TensorParallel.of(group)


def abort_collectives() -> None:
    """Let collectives that wait for a dead rank end. Those of gloo do without it."""
    group = distributed.group.WORLD if distributed.is_initialized() else None
    if group is not None and distributed.get_backend(group) == "nccl":
        group.abort()


def leave() -> None:
    """Destroy the process group, without its other ranks."""
    if distributed.is_initialized():
        abort_collectives()
        distributed.destroy_process_group()
