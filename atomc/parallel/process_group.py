"""The processes that run one model together."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class TensorParallel:
    """The place of this process among those that each hold a part of every cut parameter.

    group  the name of a process group of torch.distributed
    """

    rank: int
    size: int
    group: str

    @classmethod
    def of(cls, group: ProcessGroup) -> "TensorParallel":
        return cls(group.rank(), group.size(), group.group_name)


@dataclass(frozen=True)
class PipelineStage:
    """The place of this process in a pipeline, whose stages each hold some of the layers.

    ranks  of each stage, the process that this one exchanges states with: its rank in the default
           process group of torch.distributed
    """

    index: int
    ranks: tuple[int, ...]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.ranks) - 1

    def layers(self, count: int) -> range:
        """The layers of this stage; the first stages have one more if they do not divide."""
        per_stage, more = divmod(count, len(self.ranks))
        first = self.index * per_stage + min(self.index, more)
        return range(first, first + per_stage + (self.index < more))


class Place(NamedTuple):
    """The place of a process among those that divide its layers, among the stages, and among those
    that have requests of their own and send each other tokens for their experts. None: there are no
    others.

    capturing  the context of a capture of a CUDA graph that all ranks of a stage make at the start
    """

    tp: TensorParallel | None = None
    stage: PipelineStage | None = None
    experts: TensorParallel | None = None
    capturing: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def data_rank(self) -> int:
        """Which requests this process has."""
        return 0 if self.experts is None else self.experts.rank


ALONE = Place()
