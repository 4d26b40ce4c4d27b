"""The processes that run one model together."""

from dataclasses import dataclass

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
