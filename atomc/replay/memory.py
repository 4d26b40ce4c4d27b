"""Where the tensors of two recordings of one graph lie: in an input, at a fixed address, or in a
temporary, which has another address in each call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.replay.recording import Recording, Unrepeatable, storage_address
from atomc.replay.static_buffer import span

ALIGNMENT = 256


@dataclass(frozen=True)
class InInput:
    """offset: in bytes, from the first element of the input of this number."""

    number: int
    offset: int


@dataclass(eq=False)
class Temporary:
    """Memory that a call allocates.

    example      a tensor that takes all of it
    first, last  the numbers of the first and the last event that use it; the outputs have the
                 number after the last event
    returned     whether its first event returns it
    """

    example: Tensor
    first: int
    last: int
    returned: bool = False

    @property
    def bytes(self) -> int:
        return self.example.untyped_storage().nbytes()

    @property
    def device(self) -> torch.device:
        return self.example.device


@dataclass(frozen=True)
class InTemporary:
    """offset: in bytes, from the first byte of the temporary."""

    temporary: Temporary
    offset: int


@dataclass(frozen=True)
class Fixed:
    """A tensor that has the same address in each call."""

    tensor: Tensor


Place = InInput | InTemporary | Fixed


class Memory:
    """Finds the place of each tensor of a recording, and of its twin in another recording."""

    def __init__(self, first: Recording, second: Recording):
        self.num_events = len(first.events)
        self._inputs = (_by_storage(first.inputs), _by_storage(second.inputs))
        # Address of a storage in the first recording -> that in the second, and the temporary.
        self._temporaries: dict[int, tuple[int, Temporary]] = {}

    def temporaries(self) -> list[Temporary]:
        """In the order of their first use."""
        return list(dict.fromkeys(one for _, one in self._temporaries.values()))

    def replace(self, one: Temporary, same: Temporary) -> None:
        """Let what uses a temporary use another one that has the same content."""
        same.last = max(same.last, one.last)
        for at, (twin_at, temporary) in self._temporaries.items():
            if temporary is one:
                self._temporaries[at] = twin_at, same

    def holds(self, x: Tensor) -> bool:
        """Whether an earlier event uses the memory of this tensor of the first recording."""
        return storage_address(x) in self._temporaries

    def place(self, x: Tensor, twin: Tensor, event: int) -> Place:
        """Where x lies, of which `twin` has the role in the second recording; `event` uses it.

        Raises Unrepeatable if the two do not correspond.
        """
        if _layout(x) != _layout(twin):
            raise Unrepeatable("a tensor has another layout in each call")
        places = [_in_input(t, inputs) for t, inputs in zip((x, twin), self._inputs, strict=True)]
        if places[0] != places[1]:
            raise Unrepeatable("a kernel gets another input in each call")
        if places[0] is not None:
            return places[0]
        at, twin_at = storage_address(x), storage_address(twin)
        sizes = x.untyped_storage().nbytes(), twin.untyped_storage().nbytes()
        if sizes[0] != sizes[1] or x.data_ptr() - at != twin.data_ptr() - twin_at:
            raise Unrepeatable("temporaries have another size in each call")
        if at == twin_at:
            return Fixed(twin)
        if at not in self._temporaries:
            self._temporaries[at] = twin_at, Temporary(_whole(x), event, event)
        expected, temporary = self._temporaries[at]
        if expected != twin_at:
            raise Unrepeatable("temporaries share memory differently in each call")
        temporary.last = max(temporary.last, event)
        return self.find(x)

    def find(self, x: Tensor) -> Place:
        """The place of a tensor of the first recording that `place` has placed."""
        if (place := _in_input(x, self._inputs[0])) is not None:
            return place
        if (at := storage_address(x)) not in self._temporaries:
            return Fixed(x)
        return InTemporary(self._temporaries[at][1], x.data_ptr() - at)


def _layout(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _whole(x: Tensor) -> Tensor:
    """A tensor that takes all of the storage of x; x itself if it does."""
    storage = x.untyped_storage()
    if x.is_contiguous() and x.nbytes == storage.nbytes():
        return x
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)


def _by_storage(inputs: Sequence[object]) -> Mapping[int, list[tuple[int, Tensor]]]:
    """Address of a storage -> the inputs in it, each with its number."""
    grouped: dict[int, list[tuple[int, Tensor]]] = {}
    for number, x in enumerate(inputs):
        if isinstance(x, Tensor) and x.numel():
            grouped.setdefault(storage_address(x), []).append((number, x))
    return grouped


def _in_input(x: Tensor, inputs: Mapping[int, list[tuple[int, Tensor]]]) -> InInput | None:
    """The input in whose storage x lies, None if there is none.

    Of several in one storage, as a packed weight and its parts: the one with the layout of x, else
    with its extent, else the only one that starts where x does, else the only one around it.
    """
    candidates = inputs.get(storage_address(x), []) if x.numel() else []
    start, end = _extent(x)
    starting = [one for one in candidates if one[1].data_ptr() == start]
    groups = (
        [one for one in starting if _layout(one[1]) == _layout(x)],
        [one for one in starting if _extent(one[1])[1] == end],
        starting,
        [one for one in candidates if _extent(one[1])[0] <= start < _extent(one[1])[1]],
        candidates,
    )
    for group in groups:
        if len(group) > 1:
            raise Unrepeatable("inputs share memory")
        if group:
            number, one = group[0]
            return InInput(number, start - one.data_ptr())
    return None


def _extent(x: Tensor) -> tuple[int, int]:
    """The addresses of the first element and of the end of the last one."""
    return x.data_ptr(), x.data_ptr() + span(x) * x.element_size()


def arrange(temporaries: Sequence[Temporary]) -> tuple[dict[Temporary, int], int]:
    """Offsets of temporaries in one allocation, and its size in bytes: those that are used at the
    same time do not overlap. Larger ones choose first, the lowest gap that fits.
    """
    offsets: dict[Temporary, int] = {}
    for one in sorted(temporaries, key=lambda one: -one.bytes):
        taken = sorted(
            (offset, offset + other.bytes)
            for other, offset in offsets.items()
            if one.first <= other.last and other.first <= one.last
        )
        offset = 0
        for start, end in taken:
            if start - offset >= one.bytes:
                break
            offset = max(offset, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[one] = offset
    return offsets, max((offset + one.bytes for one, offset in offsets.items()), default=0)
