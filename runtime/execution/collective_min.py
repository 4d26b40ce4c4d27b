"""Numbers that ranks must share, such as the number of blocks: the smallest of all ranks."""

from collections.abc import Sequence

import torch
from torch import distributed

from atomc.runtime.execution.capacity import Capacity


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
