"""Memory that all processes of a group can write: a buffer in the GPU of each, opened by the others
through CUDA IPC.

torch's symmetric memory is not used: the keys of its rendezvous count the rendezvous of a process,
so that a process that already had a group never meets new ones, which count from zero.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from atomc.errors import first_line

T = TypeVar("T")
MAX_RANKS = 8
ROW_BYTES = 2**14
# Of 16 bits, the bits of -0.0: a number that was not received yet. An fp32 number of two of them is
# a subnormal one, about -4.6e-41.
EMPTY = -(2**15)


@dataclass(frozen=True, eq=False)
class PeerMemory:
    """What one rank needs to exchange rows with the others.

    buffers  int16, one of each rank in their order, [2, ranks, rows, ROW_BYTES / 2]: what it
             receives, in two halves; EMPTY before the first exchange
    halves   [rows] int32, of this rank alone: the half that an exchange of a row uses next; zeros
             before the first exchange
    aborted  [1] int32, of this rank alone: other than 0 ends all waiting
    """

    rank: int
    buffers: Sequence[Tensor]
    halves: Tensor
    aborted: Tensor

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_RANKS:
            raise ValueError(f"{self.size} ranks exchange rows: written for 2 to {MAX_RANKS}")

    @property
    def size(self) -> int:
        return len(self.buffers)

    @property
    def rows(self) -> int:
        """The most rows of one exchange."""
        return self.halves.shape[0]


def rows_of(ranks: int) -> int:
    """The most rows that so many ranks exchange at once; a buffer has 32 MiB."""
    return 1024 // ranks


def new_buffer(ranks: int, device: torch.device | str = "cpu") -> Tensor:
    shape = 2, ranks, rows_of(ranks), ROW_BYTES // 2
    return torch.full(shape, EMPTY, dtype=torch.int16, device=device)


def new_halves(ranks: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.zeros(rows_of(ranks), dtype=torch.int32, device=device)


class _Shared:
    """The memory of a group, and what its abort needs: nothing may be allocated by then."""

    def __init__(self, group: ProcessGroup, memory: PeerMemory) -> None:
        self.group, self.memory = group, memory
        device = memory.halves.device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        memory.aborted.record_stream(self._stream)

    def abort(self) -> None:
        # By a copy engine: kernels that wait may take all multiprocessors.
        with torch.cuda.stream(self._stream):
            self.memory.aborted.copy_(self._one, non_blocking=True)


_shared: dict[str, _Shared] = {}
_refused: dict[str, str] = {}


def share(group: ProcessGroup, device: torch.device) -> None:
    """Create the memory of a group whose ranks have these devices. All ranks call this, in the same
    order; either all have the memory afterwards, or all know why not.
    """
    name, size, rank = group.group_name, group.size(), group.rank()
    forget(name)
    if device.type != "cuda" or torch.version.hip:
        _refused[name] = "its ranks have no NVIDIA GPUs"
        return
    if not 2 <= size <= MAX_RANKS:
        _refused[name] = f"it has {size} ranks: written for 2 to {MAX_RANKS}"
        return
    hosts = gathered(socket.gethostname(), group)
    if len(set(hosts)) > 1:
        _refused[name] = "its ranks run on several hosts"
        return
    with torch.cuda.device(device):
        buffer = new_buffer(size, device)
        torch.cuda.synchronize()
        handle, why = attempt(lambda: _exported(buffer))
        handles = gathered(handle, group)
        buffers, failure = attempt(
            lambda: [
                buffer if peer == rank else _opened(handles[peer], buffer) for peer in range(size)
            ]
        )
        why = why or failure
        if not any(gathered(why, group)) and buffers is not None:
            why = _tried(buffers, rank, group)
        reasons = [each for each in gathered(why, group) if each]
        if reasons or buffers is None:
            _refused[name] = f"its ranks cannot write each other's memory: {reasons[0]}"
            return
        halves = new_halves(size, device)
        aborted = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize()
    _shared[name] = _Shared(group, PeerMemory(rank, buffers, halves, aborted))


def gathered(value: T, group: ProcessGroup) -> list[T]:
    """The value of each rank of the group, all of which call this."""
    values = [value] * group.size()
    distributed.all_gather_object(values, value, group=group)
    return values


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """The result and "", or None and why there is none: the other ranks wait for this one."""
    try:
        return call(), ""
    except Exception as error:  # of CUDA, whichever it is
        return None, f"{type(error).__name__}: {first_line(error)}"


def _exported(buffer: Tensor) -> tuple[Any, ...]:
    storage: Any = buffer.untyped_storage()
    return tuple(storage._share_cuda_())


def _opened(handle: tuple[Any, ...] | None, like: Tensor) -> Tensor:
    """A peer's buffer in the address space of this rank's device. The handle, which
    UntypedStorage._share_cuda_ made, begins with the number that the device has for the peer.
    """
    if handle is None:
        raise ValueError("a peer has no handle")
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_cuda(
        like.device.index, *handle[1:]
    )
    opened = torch.empty(0, dtype=like.dtype, device=like.device)
    opened.set_(storage, 0, like.shape, like.stride())
    return opened


def _tried(buffers: Sequence[Tensor], rank: int, group: ProcessGroup) -> str:
    """Why what this rank received is not what each peer sent, or ""."""

    def sent() -> None:
        for buffer in buffers:
            buffer[0, rank, 0, 0] = rank
        torch.cuda.synchronize()

    def received() -> list[int]:
        torch.cuda.synchronize()
        got: list[int] = buffers[rank][0, :, 0, 0].tolist()
        buffers[rank].fill_(EMPTY)
        torch.cuda.synchronize()
        return got

    _, why = attempt(sent)
    if any(gathered(why, group)):
        return why
    got, why = attempt(received)
    gathered(why, group)  # no rank writes before all have cleared what they received
    return why or ("" if got == list(range(len(buffers))) else f"received {got}")


def of(name: str) -> PeerMemory:
    """The memory of the group with this name. Raises ValueError if it has none."""
    if name not in _shared:
        reason = _refused.get(name, "it was not asked for")
        raise ValueError(f"process group {name!r} has no memory of all ranks: {reason}")
    return _shared[name].memory


def note(name: str, reason: str) -> None:
    """Of a group whose ranks another library connects: why it cannot, or ""."""
    _refused[name] = reason


def reasons() -> tuple[tuple[str, str], ...]:
    """Of each group that asked for memory: its name, and why it has none, or ""."""
    return tuple(sorted({**dict.fromkeys(_shared, ""), **_refused}.items()))


def abort() -> None:
    """End all waiting for peers: what kernels compute from then on is undefined."""
    for shared in _shared.values():
        shared.abort()


def forget(name: str | None = None) -> None:
    """Give up the memory of this group, or of all. No kernel may use it."""
    for shared in [name] if name else [*_shared, *_refused]:
        _shared.pop(shared, None)
        _refused.pop(shared, None)
