"""The rows that processes send to those of their experts by MORI, which writes them into buffers
that GPUs of one host open for each other.
"""

import functools
import importlib
import socket
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from atomc.errors import first_line
from atomc.platform import provider_versions
from atomc.torch_compat import peer_memory
from atomc.torch_compat.peer_memory import attempt, gathered, note

MAX_RANKS = 8  # of one host


class Received(NamedTuple):
    """What a process got, in rows for as many tokens as all processes may send; the first `used`
    of them are written, in any order.

    x, scales      [M, H] and [M, S], or None: of tokens
    weights, slots [M, k] fp32 and int32: of the choices of each token, all of them
    used           [1] int32
    """

    x: Tensor
    weights: Tensor
    scales: Tensor | None
    slots: Tensor
    used: Tensor


class Exchange:
    """The buffers of one process of a connected group. Its processes make the same calls, each
    `dispatch` before its `combine`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._operators: dict[tuple[object, ...], tuple[int, Any]] = {}
        self._sent: tuple[Any, Tensor] | None = None

    def dispatch(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weights: Tensor,
        slots: Tensor,
        slots_of_rank: int,
        *,
        most_tokens: int | None = None,
        bytes_of_results: int = 2,
    ) -> Received:
        """Send each token once to each process that one of its choices is for.

        x, x_scale     [T, H] bf16, fp32 or fp8, and [T, S] of four bytes each, or None
        weights, slots [T, k]; slot s is for the process s // slots_of_rank
        most_tokens    the largest T of any process; None: T is the same for all
        bytes_of_results  of a number that `combine` gets, at most

        Raises RuntimeError if the tokens before were not combined.
        """
        if self._sent is not None:
            raise RuntimeError("mori: tokens are sent before those sent last were combined")
        scales = 0 if x_scale is None else x_scale.shape[1]
        kind = x.dtype, x.shape[1], scales, slots.shape[1], slots_of_rank, bytes_of_results
        operator = self._operator(max(1, most_tokens or len(x)), *kind)
        slots = slots.int().contiguous()
        received = operator.dispatch(
            x.contiguous(),
            weights.float().contiguous(),
            None if x_scale is None else x_scale.contiguous(),
            slots,
        )
        self._sent = operator, slots
        return Received(*received)

    def combine(self, results: Tensor) -> Tensor:
        """The sums, in fp32, of what the processes made of each token that this one sent. [M, H],
        for the rows that it received -> [T, H].
        """
        assert self._sent is not None
        operator, slots = self._sent
        self._sent = None
        sums, _ = operator.combine(results.contiguous(), None, slots)
        out: Tensor = sums[: len(slots)].clone()  # of memory that the next call writes
        return out

    def _operator(
        self,
        tokens: int,
        dtype: torch.dtype,
        width: int,
        scales: int,
        choices: int,
        slots_of_rank: int,
        bytes_of_results: int,
    ) -> Any:
        """MORI's buffers for such rows. Creating them is a collective call, which waits: the first
        step is the largest, and smaller ones use its buffers.
        """
        key = dtype, width, scales, choices, slots_of_rank, bytes_of_results
        most, operator = self._operators.get(key, (0, None))
        if tokens > most:
            most = 1 << (tokens - 1).bit_length()
            library = importlib.import_module("mori.ops")
            config = library.EpDispatchCombineConfig(
                data_type=dtype,
                rank=self.rank,
                world_size=self.size,
                hidden_dim=width,
                scale_dim=scales,
                scale_type_size=torch.float32.itemsize,
                max_token_type_size=max(bytes_of_results, dtype.itemsize),
                max_num_inp_token_per_rank=most,
                num_experts_per_rank=slots_of_rank,
                num_experts_per_token=choices,
                gpu_per_node=self.size,
            )
            operator = library.EpDispatchCombineOp(config)
            self._operators[key] = most, operator
        return operator


_exchanges: dict[str, Exchange] = {}


@functools.cache
def missing() -> str | None:
    """Why MORI cannot be imported here, or None."""
    status = provider_versions()["mori"]
    if not status.found:
        return status.reason
    try:
        for name in ("mori.ops", "mori.shmem"):
            importlib.import_module(name)
    except Exception as error:  # of many types: it looks for HIP
        return f"mori cannot be imported: {type(error).__name__}: {first_line(error)}"
    return None


def connect(group: ProcessGroup) -> None:
    """Let the processes of a group write into each other's memory, unless they can already. All of
    them call this; either all are connected afterwards, or all know why not.
    """
    name = group.group_name
    if name in _exchanges:
        return
    of_process = missing(), str(provider_versions()["mori"].version), socket.gethostname()
    reasons, versions, hosts = zip(*gathered(of_process, group), strict=True)
    if len(set(versions)) > 1:
        reasons += (f"its processes have versions {', '.join(versions)} of MORI",)
    if len(set(hosts)) > 1:
        reasons += ("its processes run on several hosts",)
    if not any(reasons):
        # Not shmem_torch_process_group_init, which is for groups with rank 0 of all processes.
        shmem = importlib.import_module("mori.shmem")
        number, size = group.rank(), group.size()
        unique_id = gathered(None if number else shmem.shmem_get_unique_id(), group)[0]
        kind = shmem.MORI_SHMEM_INIT_WITH_UNIQUEID
        _, why = attempt(lambda: shmem.shmem_init_attr(kind, number, size, unique_id))
        reasons = tuple(gathered(why, group))
    note(name, next(filter(None, reasons), ""))
    if not any(reasons):
        _exchanges[name] = Exchange(group.rank(), group.size())


def exchange_of(name: str) -> Exchange:
    """The buffers of the group with this name. Raises ValueError if it is not connected."""
    if name not in _exchanges:
        raise ValueError(not_connected(name, peer_memory.reasons()))
    return _exchanges[name]


def not_connected(name: str, peer_groups: tuple[tuple[str, str], ...]) -> str:
    """Why MORI does not connect this group: the reason in `peer_groups`, or that it has none."""
    return (
        f"MORI does not connect group {name!r}: {dict(peer_groups).get(name, 'it was not asked')}"
    )


def disconnect() -> None:
    """Give up the buffers of all groups. No kernel may use them."""
    if _exchanges:
        _exchanges.clear()
        importlib.import_module("mori.shmem").shmem_finalize()
