"""What ranks exchange before and after a layer whose parameters are cut: hooks of modules.

They call functional collectives, which Dynamo captures. Nothing in a graph depends on the rank:
what differs is in buffers.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from atomc import ops

# Buffers of modules: which columns of its input this rank reads; the row of each expert; and what
# ops.dispatch_tokens calls places.
COLUMNS, EXPERT_MAP, EXPERT_PLACES = "columns_of_rank", "expert_map", "expert_places"
Args = tuple[Any, ...]  # of a module


@dataclass(frozen=True)
class SumOverRanks:
    """A hook that runs after a module: the sum of its results."""

    group: str

    def __call__(self, module: nn.Module, args: Args, partial: Tensor) -> Tensor:
        return ops.all_reduce.reference(partial, self.group)


@dataclass(frozen=True)
class ColumnsOfRank:
    """A hook that runs before a linear layer: of its whole input, the columns of this rank."""

    def __call__(self, module: nn.Module, args: Args) -> Args:
        x, *others = args
        return x.index_select(-1, module.get_buffer(COLUMNS)), *others


@dataclass(frozen=True)
class ExpertsOfRank:
    """A hook after experts: the sum of the results of all `size` ranks for each of its tokens.

    nowhere  the id of an expert of another rank
    """

    nowhere: int

    def __call__(self, module: nn.Module, args: Args) -> Args:
        x, ids, weights, *others = args
        rows = module.get_buffer(EXPERT_MAP)
        # While kernels are loaded, no router runs, and ids are what was in memory.
        local = rows[ids.clamp(0, len(rows) - 1)]
        return x, local, weights.masked_fill(local == self.nowhere, 0.0), *others


@dataclass(frozen=True)
class TokensOfRanks:
    """A hook that runs before experts, called with x, ids [T, k] and weights [T, k] of the tokens
    of this rank: the experts get the tokens of all `size` ranks, as ExpertsOfRank gives them.
    """

    nowhere: int
    size: int
    group: str

    def __call__(self, module: nn.Module, args: Args) -> Args:
        x, ids, weights, *others = args
        places = module.get_buffer(EXPERT_PLACES)
        sent = ops.dispatch_tokens(x, ids, weights, places, self.nowhere, self.size, self.group)
        return *sent[:3], *others


@dataclass(frozen=True)
class ResultsOfRanks:
    """A hook that runs after experts: for each token of this rank, the sum of the results of all
    `size` ranks.
    """

    size: int
    group: str

    def __call__(self, module: nn.Module, args: Args, partial: Tensor) -> Tensor:
        _, ids, *_ = args  # as TokensOfRanks gave them
        return ops.combine_tokens(partial, ids, self.size, self.group)
