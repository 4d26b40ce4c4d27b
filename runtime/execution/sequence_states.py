"""The tensors of state per sequence, and copies between their rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from atomc.ops.state import StateSpec
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.step import Copy

ALIGNMENT = 256  # bytes; as the allocator aligns a tensor of its own


class SequenceStates:
    """The tensors of all state per sequence, zeroed: [rows, *shape] for each.

    Tensors of equal shape and dtype are parts of one [layers, rows, *shape], so that one copy moves
    a row of all layers.
    """

    def __init__(
        self, specs: Sequence[StateSpec], rows: StateRows, device: torch.device | str
    ) -> None:
        places: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, str]]] = {}
        for index, spec in enumerate(specs):
            for tensor in spec.tensors if spec.per_sequence else ():
                places.setdefault((tensor.shape, tensor.dtype), []).append((index, tensor.role))
        self._of: dict[int, dict[str, Tensor]] = {}
        self._stacked = []
        for (shape, dtype), layers in places.items():
            stacked = _aligned_zeros(len(layers), (rows.total, *shape), dtype, device)
            self._stacked.append(stacked)
            for layer, (index, role) in enumerate(layers):
                self._of.setdefault(index, {})[role] = stacked[layer]

    def of(self, index: int) -> Mapping[str, Tensor]:
        """The tensors by role of the spec with this number."""
        return self._of[index]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy rows of all layers, after the work that was launched before; no row is both source
        and destination.
        """
        for source, to, count in _runs(copies):
            for stacked in self._stacked:
                stacked[:, to : to + count].copy_(stacked[:, source : source + count])


def _aligned_zeros(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Zeros [layers, *shape]; each layer is contiguous and aligned as a tensor of its own."""
    size = torch.Size(shape).numel()
    step = ALIGNMENT // dtype.itemsize
    memory = torch.zeros(layers, -(-size // step) * step, dtype=dtype, device=device)
    return memory[:, :size].view(layers, *shape)


def _runs(copies: Iterable[Copy]) -> Iterator[tuple[int, int, int]]:
    """(from, to, count) of copies whose rows follow each other: a copy takes a launch, whatever its
    size.
    """
    run: tuple[int, int, int] | None = None
    for source, to in sorted(copies, key=lambda copy: copy[1]):
        if run is not None and (source, to) == (run[0] + run[2], run[1] + run[2]):
            run = run[0], run[1], run[2] + 1
            continue
        if run is not None:
            yield run
        run = source, to, 1
    if run is not None:
        yield run
