"""Quantization schemes of experts, with the quantizers of activations: references of ops."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atomc.ops.quant import quant_fp8_group, quant_fp8_per_token, quant_int8_per_token


class ExpertsScheme(ABC):
    """The format of weights and activations.

    block  the columns that share a scale; 0: those of a row do
    """

    name: ClassVar[str]
    block: int = 0

    @abstractmethod
    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of x: [..., K] -> [..., K] and [..., S] fp32; without codes x, None."""


@dataclass(frozen=True)
class Unquantized(ExpertsScheme):
    """16 bits or fp32."""

    name = "none"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None


@dataclass(frozen=True)
class Fp8PerToken(ExpertsScheme):
    """fp8 with a scale per row of activations, and one per output or one per expert of weights."""

    name = "fp8"
    dtype: torch.dtype = torch.float8_e4m3fn

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quant_fp8_per_token.reference(x, self.dtype)


@dataclass(frozen=True)
class Fp8PerBlock(ExpertsScheme):
    """fp8 with a scale per `block` columns of a row of activations, and per square of weights."""

    name = "fp8_block"
    dtype: torch.dtype = torch.float8_e4m3fn
    block: int = 128

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quant_fp8_group.reference(x, self.block, dtype=self.dtype)


@dataclass(frozen=True)
class Int8PerToken(ExpertsScheme):
    """int8 with a scale per row of activations, and one per output of weights."""

    name = "int8"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quant_int8_per_token.reference(x)


SCHEMES: dict[str, ExpertsScheme] = {
    scheme.name: scheme for scheme in (Unquantized(), Fp8PerToken(), Fp8PerBlock(), Int8PerToken())
}
ALL_SCHEMES = tuple(SCHEMES)
