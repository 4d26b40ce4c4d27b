"""The part of a tensor that one rank holds."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """Part `index` of `parts` equal ones, along dimension `dim`.

    segments  the dimension has this many equal segments, such as the rows of gate and of up, each
              of which is cut
    """

    dim: int
    parts: int
    index: int
    segments: int = 1

    def of(self, tensor: Tensor) -> Tensor:
        """The part, contiguous, in memory of its own. Raises ValueError if there is none."""
        self.size_of(tensor.shape[self.dim])
        pieces = torch.unflatten(tensor, self.dim, (self.segments, self.parts, -1))
        part = pieces.select(self.dim + 1, self.index).flatten(self.dim, self.dim + 1)
        return part.clone(memory_format=torch.contiguous_format)

    def size_of(self, size: int) -> int:
        """The part's size along the dimension. Raises ValueError if the parts are not equal."""
        part, rest = divmod(size, self.parts * self.segments)
        if rest or not part:
            what = f"{self.segments} segments of {size // self.segments:,}" * (self.segments > 1)
            raise ValueError(f"{what or f'{size:,}'} do not divide into {self.parts} equal parts")
        return part * self.segments

    def range_of(self, size: int) -> range:
        """The indices of the part along a dimension without segments."""
        part = self.size_of(size)
        return range(self.index * part, (self.index + 1) * part)
