"""The part of a tensor that one rank holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.parallel.vocab import rows_of_rank


@dataclass(frozen=True)
class ShardSlice:
    """Part `index` of `parts` equal ones, along dimension `dim`: a range, or `members`.

    segments  the relative sizes of segments of the dimension, each of which is cut: equal ones of
              gate and of up, others of queries, keys and values
    padded    zeros follow the last part, if the dimension does not divide
    members   the indices along the dimension that the part has, in this order: experts that are
              placed on a rank. Empty: a range
    """

    dim: int
    parts: int
    index: int
    segments: tuple[int, ...] = (1,)
    padded: bool = False
    members: tuple[int, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The part, contiguous, in memory of its own. Raises ValueError if there is none."""
        total = tensor.shape[self.dim]
        size = self.size_of(total)
        shape = [*tensor.shape[: self.dim], size, *tensor.shape[self.dim + 1 :]]
        if self.padded:
            first = self.index * size
            rows = tensor.narrow(self.dim, first, min(size, total - first))
            padded = tensor.new_zeros(shape)
            padded.narrow(self.dim, 0, rows.shape[self.dim]).copy_(rows)
            return padded
        if self.members:
            selected = tensor.new_empty(shape)
            # Copies exist for all dtypes; of a mapped file, only these are read.
            for target, i in zip(selected.unbind(self.dim), self.members, strict=True):
                target.copy_(tensor.select(self.dim, i))
            return selected
        lengths = self.lengths(total)
        own_lengths = [length // self.parts for length in lengths]
        part = tensor.new_empty(shape)
        for segment, target in zip(
            torch.split(tensor, lengths, self.dim),
            torch.split(part, own_lengths, self.dim),
            strict=True,
        ):
            own_length = target.shape[self.dim]
            target.copy_(segment.narrow(self.dim, self.index * own_length, own_length))
        return part

    def position(self, index: int, size: int) -> int | None:
        """Where the part, which has this size, has an index of the whole dimension; None: another
        part has it.
        """
        if self.members:
            return self.members.index(index) if index in self.members else None
        position = index - self.index * size
        return position if 0 <= position < size else None

    def lengths(self, size: int) -> list[int]:
        """Of each segment. Raises ValueError if the size is not in this proportion."""
        total = sum(self.segments)
        if any(size * segment % total for segment in self.segments):
            of = " : ".join(map(str, self.segments))
            raise ValueError(f"{size:,} do not divide into segments of {of}")
        return [size * segment // total for segment in self.segments]

    def size_of(self, size: int) -> int:
        """The part's size along the dimension. Raises ValueError if the parts are not equal, or one
        would be empty.
        """
        if self.padded:
            return rows_of_rank(size, self.parts)
        lengths = self.lengths(size)
        if any(length % self.parts or not length for length in lengths):
            what = "segments of " * (len(lengths) > 1) + ", ".join(f"{n:,}" for n in lengths)
            raise ValueError(f"{what} do not divide into {self.parts} equal parts")
        return size // self.parts
