"""What a dumped file needs to run on its own: inputs from a seeded generator, and a checksum of the outputs."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Input:
    """A tensor that stands in for a weight or an input: the same numbers for the same name, in every file.

    below    integers are drawn below this; without it they count 0, 1, 2, ... along the last dimension
    strides  None: contiguous
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    below: int | None = None
    device: str = "cpu"
    strides: tuple[int, ...] | None = None

    def make(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        made = self._values(generator).to(self.dtype)
        if self.strides is not None:
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(made)
        return made.to(self.device)

    def _values(self, generator: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.ones(self.shape)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            if len(self.shape) < 2:  # the weights of norms, scales, frequencies: positive, around one
                return torch.rand(self.shape, generator=generator) + 0.5
            # A linear layer of these keeps the size of what comes in.
            return torch.randn(self.shape, generator=generator) / math.sqrt(max(self.shape[-1], 1))
        below = self.below
        if below is None and self.dtype.itemsize == 1:  # packed weights
            below = 128
        if below is not None:
            return torch.randint(max(below, 1), self.shape, generator=generator)
        counted: Tensor = torch.arange(self.shape[-1] if self.shape else 1).expand(self.shape or (1,))
        return counted.contiguous().view(self.shape)


@dataclass(frozen=True)
class Packed:
    """The tensors of these names, row behind row."""

    names: tuple[str, ...]


def make(recipes: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs by name; whatever is neither Input nor Packed stands for itself."""
    made: dict[str, Any] = {}
    for name, given in recipes.items():
        match given:
            case Input():
                made[name] = given.make(name)
            case Packed():
                made[name] = torch.cat([made[part] for part in given.names])
            case _:
                made[name] = given
    return made


def run(forward: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Call forward on the inputs; print dtype, shape and mean magnitude of each output, and a checksum of all."""
    with torch.inference_mode():
        outputs = forward(**make(inputs))
    checksum = 0.0
    for number, output in enumerate(outputs if isinstance(outputs, tuple | list) else [outputs]):
        if isinstance(output, Tensor):
            size = output.to(torch.float64).abs().mean().item() if output.numel() else 0.0
            checksum += size
            dtype = str(output.dtype).removeprefix("torch.")
            print(f"output {number}: {dtype}{list(output.shape)}, mean magnitude {size:.6g}")
        else:
            print(f"output {number}: {output!r}")
    print(f"checksum: {checksum:.6g}")
