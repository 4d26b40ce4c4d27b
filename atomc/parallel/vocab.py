"""Embeddings and heads cut by vocabulary: each process holds the rows of consecutive ids.

An embedding looks up the ids that the process holds, and zeros for all others; the sum over the
processes is the whole lookup. A head computes its logits, which are gathered. All processes hold
the same number of rows: the last ones are padded with zeros, of which no logits are returned.

The first id is a buffer, and the rank is no attribute: the processes compile equal graphs.
"""

import torch
from torch import Tensor, nn

from atomc.parallel.group import TensorParallel

collective = torch.ops._c10d_functional


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


def own_ids(size: int, tp: TensorParallel) -> range:
    """The ids of which this process holds the rows."""
    rows = rows_of_rank(size, tp.size)
    return range(tp.rank * rows, min((tp.rank + 1) * rows, size))


def own_rows(weight: Tensor, tp: TensorParallel) -> Tensor:
    """The rows [rows_of_rank, ...] of this process, padded with zeros, in memory of their own.
    weight [V, ...] of the whole vocabulary.
    """
    size = weight.shape[0]
    ids, rows = own_ids(size, tp), rows_of_rank(size, tp.size)
    own = weight.new_zeros(rows, *weight.shape[1:])
    own[: len(ids)].copy_(weight[ids.start : ids.stop])
    return own


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
        summed: Tensor = collective.wait_tensor(collective.all_reduce(found, "sum", self.group))
        return summed


class VocabParallelHead(nn.Linear):
    """A head of which this process holds as many rows as each other process of the group; it
    returns the logits [..., out_features] of the whole vocabulary.
    """

    ranks: int
    group: str

    def forward(self, input: Tensor) -> Tensor:
        return gathered(super().forward(input), self.out_features, self.ranks, self.group)


def gathered(logits: Tensor, size: int, ranks: int, group: str) -> Tensor:
    """The logits of all processes side by side, without those of padding: [..., V / ranks] ->
    [..., V].
    """
    found = collective.all_gather_into_tensor(logits.contiguous(), ranks, group)
    # Not chunk, which branches on the number of rows.
    parts = collective.wait_tensor(found).view(ranks, *logits.shape).unbind(0)
    found = torch.cat(parts, -1)
    return found if found.shape[-1] == size else found[..., :size]


def cut_embedding(module: nn.Module, tp: TensorParallel) -> None:
    """Cut an embedding in place. A head that shares its weight is cut as well: pass it to
    `cut_head`, before or after.

    Raises ValueError for a module that is no embedding or whose rows have a maximal norm, and as
    `rows_of_rank`.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        raise ValueError(
            f"{module} cannot be cut by vocabulary: expected an nn.Embedding without max_norm"
        )
    first = own_ids(module.num_embeddings, tp).start
    _cut(module, module.num_embeddings, tp)
    _become(module, VocabParallelEmbedding)
    assert isinstance(module, VocabParallelEmbedding)
    module.group = tp.group
    # On the CPU also when the model is built on meta: the value must exist.
    where = torch.device("cpu") if module.weight.is_meta else module.weight.device
    module.register_buffer("first_id", torch.tensor(first, device=where), persistent=False)


def cut_head(module: nn.Module, tp: TensorParallel) -> None:
    """Cut a head in place. An embedding that shares its weight is cut as well: pass it to
    `cut_embedding`, before or after.

    Raises ValueError for a module that is no linear layer, and as `rows_of_rank`.
    """
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{module} cannot be cut by vocabulary: expected an nn.Linear")
    _cut(module, module.out_features, tp)
    _become(module, VocabParallelHead)
    assert isinstance(module, VocabParallelHead)
    module.ranks, module.group = tp.size, tp.group


def _cut(module: nn.Module, size: int, tp: TensorParallel) -> None:
    """Cut the parameters that still have a row for each id: a shared weight is cut once."""
    rows = rows_of_rank(size, tp.size)
    for parameter in module.parameters(recurse=False):
        if parameter.shape[0] == size:
            parameter.data = own_rows(parameter.data, tp)
        elif parameter.shape[0] != rows:
            raise ValueError(
                f"a parameter of {module} has {parameter.shape[0]} rows, expected {size}, or "
                f"{rows} if it was cut already"
            )


def _become(module: nn.Module, cut: type[nn.Module]) -> None:
    """Give a module the class `cut`, around what its own does, such as scaling a lookup."""
    kind = type(module)
    plain = kind in cut.__bases__
    module.__class__ = cut if plain else type(f"VocabParallel{kind.__name__}", (cut, kind), {})
