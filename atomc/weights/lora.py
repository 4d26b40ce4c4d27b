"""LoRA adapters in the graph inputs of a program: one row of each tensor per adapter."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atomc.ops.inputs import LoraWeights


class LoraPair(NamedTuple):
    """The products of an adapter for one layer: A [r, K], B [N, r] and the factor of B @ A."""

    a: Tensor
    b: Tensor
    scale: float


class LoraLayer(NamedTuple):
    """The adapters of one layer: A [adapters, rank, K] and B.T [adapters, rank, N] of
    ops.lora_linear, or their parts if the layer is merged with others.
    """

    lora_a: Tensor
    lora_b: Tensor

    def fitted(self, pair: LoraPair) -> tuple[Tensor, Tensor]:
        """A and scaled B.T, in the dtype of the program, on the CPU. Raises ValueError for another
        rank or shape, and for numbers that are not finite: the products of one adapter must not
        reach the rows of others.
        """
        (_, rank, inputs), outputs, dtype = (
            self.lora_a.shape,
            self.lora_b.shape[-1],
            self.lora_a.dtype,
        )
        if pair.a.shape[-1] != inputs or pair.b.shape[0] != outputs:
            raise ValueError(
                f"lora_A is {list(pair.a.shape)} and lora_B {list(pair.b.shape)}, but the layer "
                f"has {inputs} inputs and {outputs} outputs"
            )
        if len(pair.a) > rank:
            raise ValueError(f"its rank is {len(pair.a)}, at most {rank} fits: raise max_lora_rank")
        a = pair.a.to(dtype)
        b = (pair.b.to(torch.float32) * pair.scale).mT.to(dtype)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise ValueError(f"its weights are not finite numbers in {dtype}")
        return a, b


class LoraLayers:
    """The linear layers of a program that adapters may change, by module path. A layer that is
    called several times in a step has several places.
    """

    def __init__(self) -> None:
        self._places: dict[str, dict[int, dict[str, Tensor]]] = {}

    def allocate(self, weights: LoraWeights, device: torch.device) -> Tensor:
        """The tensor of a graph input, zero: no adapter is loaded."""
        stacked = torch.zeros(weights.shape, dtype=weights.dtype, device=device)
        if weights.role == "lora_a":
            parts: Sequence[Tensor] = stacked.chunk(len(weights.paths), 1)
        else:
            parts = torch.split(stacked[..., : sum(weights.widths)], list(weights.widths), -1)
        for path, part in zip(weights.paths, parts, strict=True):
            if path:  # else a merged layer whose output is not read
                places = self._places.setdefault(path, {})
                places.setdefault(weights.number, {})[weights.role] = part
        return stacked

    def __len__(self) -> int:
        return len(self._places)

    @property
    def paths(self) -> list[str]:
        return list(self._places)

    def layers(self, path: str) -> list[LoraLayer]:
        return [LoraLayer(**place) for place in self._places[path].values()]

    @property
    def bytes(self) -> int:
        return sum(
            part.nbytes for path in self._places for layer in self.layers(path) for part in layer
        )

    def write(self, number: int, pairs: Mapping[str, LoraPair]) -> None:
        """Let the adapter with this number be these pairs, by module path; in other layers it
        changes nothing. Raises ValueError with the layer if a pair does not fit, which changes
        nothing.
        """
        fitted = {}
        for path, pair in pairs.items():
            try:
                fitted[path] = self.layers(path)[0].fitted(pair)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        for path in self._places:
            for layer in self.layers(path):
                layer.lora_a[number].zero_()
                layer.lora_b[number].zero_()
                if path in fitted:
                    a, b = fitted[path]
                    layer.lora_a[number, : len(a)].copy_(a)
                    layer.lora_b[number, : len(b)].copy_(b)
