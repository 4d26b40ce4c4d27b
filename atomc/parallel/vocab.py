"""Embeddings and heads cut by vocabulary: each process holds the rows of consecutive ids.

An embedding looks up the ids that the process holds, and zeros for all others; the sum over the
processes is the whole lookup. A head computes its logits, which are gathered. All processes hold
the same number of rows: the last ones are padded with zeros, of which no logits are returned.

Parameters are cut before (atomc.parallel.sharding). The first id is a buffer, and the rank is no
attribute: the processes compile equal graphs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.parallel.process_group import TensorParallel


def rows_of_rank(size: int, ranks: int) -> int:
    """The rows that each process holds of a vocabulary of this size, padding included.

    Raises ValueError if some process would hold nothing but padding.
    """
    rows = -(-size // ranks)
    if (ranks - 1) * rows >= size:
        raise ValueError(
            f"a vocabulary of {size} cannot be cut over {ranks} processes, {rows} rows each: the "
            "last would hold nothing; use fewer processes"
        )
    return rows


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which this process holds the rows from `first_id` on.

    group  the name of the process group over which lookups are summed
    """

    first_id: Tensor
    group: str

    def forward(self, input: Tensor) -> Tensor:
        row = input - self.first_id
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        rows = super().forward(row.masked_fill(elsewhere, 0))
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        return ops.all_reduce.reference(rows, self.group)


class VocabParallelHead(nn.Linear):
    """A head of which this process holds as many rows as each other process of the group; it
    returns the logits [..., out_features] of the whole vocabulary.
    """

    ranks: int
    group: str

    def forward(self, input: Tensor) -> Tensor:
        logits = ops.all_gather.reference(super().forward(input), self.ranks, self.group)
        size = self.out_features
        return logits if logits.shape[-1] == size else logits[..., :size]


@dataclass(frozen=True)
class LogitsOfRank:
    """What gives the results of all logits, of which each rank has some columns, [R, rows].

    size    of the vocabulary
    first   the id of this rank's first column
    """

    size: int
    first: int
    ranks: int
    group: str

    def gathered(self, logits: Tensor) -> Tensor:
        """The logits [R, size] of all ids."""
        return ops.all_gather.reference(logits, self.ranks, self.group)[..., : self.size]

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The id of the largest logit of each row [R] i64, the smallest among equals, and that
        logit [R]; NaN if any logit of the row is, and the id is then meaningless but in range.
        """
        value, column = logits[..., : self.size - self.first].max(-1)
        # Exact for logits of any dtype.
        pair = torch.stack([value.double().view(torch.int64), column + self.first], -1)
        pairs = ops.all_gather.reference(pair, self.ranks, self.group).view(*value.shape, -1, 2)
        values, ids = pairs[..., 0].contiguous().view(torch.float64), pairs[..., 1]
        largest = values.amax(-1, keepdim=True)
        smallest_id = ids.masked_fill(values != largest, self.size - 1).amin(-1)
        return smallest_id, largest.squeeze(-1).to(value.dtype)


def sum_lookups(module: nn.Embedding, tp: TensorParallel) -> None:
    """Have an embedding whose weight is cut return the rows of all ids."""
    first = tp.rank * len(module.weight)
    # On the CPU also when the model is built on meta: the value must exist.
    where = torch.device("cpu") if module.weight.is_meta else module.weight.device
    _become(module, VocabParallelEmbedding)
    assert isinstance(module, VocabParallelEmbedding)
    module.group = tp.group
    module.register_buffer("first_id", torch.tensor(first, device=where), persistent=False)


def gather_logits(module: nn.Linear, tp: TensorParallel) -> None:
    """Have a head whose parameters are cut return the logits of all ids."""
    _become(module, VocabParallelHead)
    assert isinstance(module, VocabParallelHead)
    module.ranks, module.group = tp.size, tp.group


def leave_apart(module: VocabParallelHead, rank: int) -> LogitsOfRank:
    """Have a head return this rank's logits only, those of padding included."""
    rows = len(module.weight)
    of_rank = LogitsOfRank(module.out_features, rank * rows, module.ranks, module.group)
    del module.ranks, module.group
    module.out_features = rows
    plain: nn.Module = module
    plain.__class__ = nn.Linear
    return of_rank


def _become(module: nn.Module, cut: type[nn.Module]) -> None:
    """Give a module the class `cut`, around what its own does, such as scaling a lookup."""
    kind = type(module)
    plain = kind in cut.__bases__
    module.__class__ = cut if plain else type(f"VocabParallel{kind.__name__}", (cut, kind), {})
