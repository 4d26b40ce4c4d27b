"""The part of a tensor that one rank holds."""

from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.parallel.vocab import rows_of_rank


@dataclass(frozen=True)
class Cut:
    """Part `index` of `parts` equal ones, along dimension `dim`.

    segments  the dimension has this many equal segments, such as the rows of gate and of up, each
              of which is cut
    padded    zeros follow the last part, if the dimension does not divide
    """

    dim: int
    parts: int
    index: int
    segments: int = 1
    padded: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part, contiguous, in memory of its own. Raises ValueError if there is none."""
        size = self.size_of(tensor.shape[self.dim])
        if self.padded:
            first = self.index * size
            own = tensor.narrow(self.dim, first, min(size, tensor.shape[self.dim] - first))
            shape = [*tensor.shape[: self.dim], size, *tensor.shape[self.dim + 1 :]]
            padded = tensor.new_zeros(shape)
            padded.narrow(self.dim, 0, own.shape[self.dim]).copy_(own)
            return padded
        pieces = torch.unflatten(tensor, self.dim, (self.segments, self.parts, -1))
        part = pieces.select(self.dim + 1, self.index).flatten(self.dim, self.dim + 1)
        return part.clone(memory_format=torch.contiguous_format)

    def size_of(self, size: int) -> int:
        """The part's size along the dimension. Raises ValueError if the parts are not equal, or one
        would be empty.
        """
        if self.padded:
            return rows_of_rank(size, self.parts)
        part, rest = divmod(size, self.parts * self.segments)
        if rest or not part:
            what = f"{self.segments} segments of {size // self.segments:,}" * (self.segments > 1)
            raise ValueError(f"{what or f'{size:,}'} do not divide into {self.parts} equal parts")
        return part * self.segments
