"""Embeddings and heads cut by vocabulary: each process holds the rows of consecutive ids.

An embedding looks up the ids that the process holds, and zeros for all others; the sum over the
processes is the whole lookup. A head computes its logits, which are gathered. All processes hold
the same number of rows: the last ones are padded with zeros, of which no logits are returned.

Parameters are cut before (atomc.parallel.sharding). The first id is a buffer, and the rank is no
attribute: the processes compile equal graphs.
"""

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.parallel.group import TensorParallel


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
        found = super().forward(row.masked_fill(elsewhere, 0))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        return ops.all_reduce.reference(found, self.group)


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


def _become(module: nn.Module, cut: type[nn.Module]) -> None:
    """Give a module the class `cut`, around what its own does, such as scaling a lookup."""
    kind = type(module)
    plain = kind in cut.__bases__
    module.__class__ = cut if plain else type(f"VocabParallel{kind.__name__}", (cut, kind), {})
