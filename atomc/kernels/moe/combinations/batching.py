"""Rows of tokens as a batch per expert, [E, C, ...]."""

import torch
from torch import Tensor


def slots_of(ids: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Where in a batch a token is, for each of its experts: the tokens of an expert in their order,
    each once, even if it chose the expert twice.

    ids [T, k] int64, -1 for none; T at most `capacity`
        -> rows of the flat batch [E * C], [T, k] int64, -1 for none; tokens per expert [E] int32
    """
    absent = ids < 0
    chosen = ids.new_zeros(len(ids), num_experts + 1, dtype=torch.bool)
    chosen = chosen.scatter_(1, ids.masked_fill(absent, num_experts), True)[:, :num_experts]
    before = (chosen.cumsum(0) - 1).gather(1, ids.clamp(min=0))
    slots = ids * capacity + before
    return slots.masked_fill(absent, -1), chosen.sum(0, dtype=torch.int32)


def batch_rows(x: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """x [T, W] -> [E, C, W]; rows without a token are undefined."""
    rows = num_experts * capacity
    batch = x.new_empty(rows + 1, x.shape[-1])  # the last for choices without an expert
    where = slots.masked_fill(slots < 0, rows)
    batch[where] = x.unsqueeze(1).expand(*slots.shape, x.shape[-1])
    return batch[:rows].view(num_experts, capacity, -1)
