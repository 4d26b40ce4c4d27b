"""Which rank has which expert, from the expert maps of all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.kernels.moe.collectives import Ranks


@dataclass(frozen=True)
class Placement:
    """owner  [E] int64: the rank of an expert
    row    [E] int64: its row in the weights of that rank
    held   how many experts each rank has
    """

    owner: Tensor
    row: Tensor
    held: tuple[int, ...]


def placement(part: str, expert_map: Tensor, ranks: Ranks) -> Placement:
    """A collective call. Raises ValueError unless each expert is on exactly one rank."""
    maps = ranks.all_gather(expert_map.long().unsqueeze(0))
    owners = (maps >= 0).sum(0)
    if bool((owners != 1).any()):
        expert = int((owners != 1).nonzero()[0])
        raise ValueError(
            f"{part}: expert {expert} is on {int(owners[expert])} ranks by their expert maps; "
            "each expert has to be on one"
        )
    owner = (maps >= 0).int().argmax(0)
    row = maps.gather(0, owner.unsqueeze(0)).squeeze(0)
    return Placement(owner, row, tuple(torch.bincount(owner, minlength=ranks.size).tolist()))
