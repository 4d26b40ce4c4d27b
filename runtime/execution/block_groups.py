"""What ranks must agree on before the caches are allocated: block groups, of which each stage has
some and the scheduler knows all, and sizes, which are the smallest of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import distributed

from atomc.ops.state import StateSpec, groups_of
from atomc.runtime.execution.capacity import Capacity
from atomc.runtime.scheduling.blocks import NewBlocks
from atomc.runtime.scheduling.step import ScheduledStep

UNLIMITED = 2**62  # blocks of a group without layers in a stage


@dataclass(frozen=True)
class BlockGroups:
    """windows: of all groups of the model; own: the numbers of those with layers in this stage."""

    windows: tuple[int, ...]
    own: tuple[int, ...]

    @classmethod
    def of(cls, specs: Sequence[StateSpec], *, in_stages: bool) -> "BlockGroups":
        """All ranks call this. Raises ValueError if only some stages have state per sequence, which
        the scheduler would manage for all.
        """
        windows = tuple(group.window for group in groups_of(specs))
        if not in_stages:
            return cls(windows, tuple(range(len(windows))))
        kinds: list[tuple[tuple[int, ...], bool]] = [((), False)] * distributed.get_world_size()
        per_sequence = any(spec.per_sequence for spec in specs)
        distributed.all_gather_object(kinds, (windows, per_sequence))
        if len({has for _, has in kinds}) > 1:
            raise ValueError(
                "layers with state per sequence are in some stages only: choose a pp with which "
                "each stage has such a layer"
            )
        every = tuple(sorted({window for of_rank, _ in kinds for window in of_rank}))
        return cls(every, tuple(every.index(window) for window in windows))

    def whole(self, size: Capacity) -> Capacity:
        """A size of the groups of this stage, as one of all groups."""
        counts = dict(zip(self.own, size.num_blocks, strict=True))
        numbers = range(len(self.windows))
        return replace(size, num_blocks=tuple(counts.get(i, UNLIMITED) for i in numbers))

    def own_blocks(self, size: Capacity) -> tuple[int, ...]:
        """Of a size of all groups, the blocks of those of this stage."""
        return tuple(size.num_blocks[i] for i in self.own)

    def own_part(self, step: ScheduledStep) -> ScheduledStep:
        """The step with the blocks of the groups of this stage."""
        if self.own == tuple(range(len(self.windows))):
            return step

        def own(blocks: Sequence[NewBlocks]) -> tuple[NewBlocks, ...]:
            return tuple([blocks[i] for i in self.own])

        rows = tuple([(slot, own(blocks)) for slot, blocks in step.decoding.blocks])
        return step._replace(
            chunks=tuple([chunk._replace(blocks=own(chunk.blocks)) for chunk in step.chunks]),
            decoding=step.decoding._replace(blocks=rows),
        )


def minimum(values: Sequence[int], ranks: int, device: torch.device) -> list[int]:
    """The smallest of each value over all ranks, which must all call this; with one rank, the
    values. The ranks are the default process group.
    """
    if ranks == 1:
        return list(values)
    shared = torch.tensor(values, dtype=torch.int64, device=device)
    distributed.all_reduce(shared, distributed.ReduceOp.MIN)
    return [int(value) for value in shared.tolist()]


def smallest(size: Capacity, ranks: int, device: torch.device) -> Capacity:
    """What all ranks have memory for."""
    *num_blocks, block_size, max_model_len, snapshots = minimum(
        [*size.num_blocks, size.block_size, size.max_model_len, size.snapshots], ranks, device
    )
    return Capacity(tuple(num_blocks), block_size, max_model_len, snapshots)
