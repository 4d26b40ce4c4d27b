"""Quantization schemes of experts: the quantizer of activations, and the product of one expert.

Both are the references of ops: `quantize` of the quantizer, `linear` of the scaled linear.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.ops.quant import quant_fp8_group, quant_fp8_per_token, quant_int8_per_token
from atomc.ops.scaled_linear import (
    scaled_linear_fp8,
    scaled_linear_fp8_block,
    scaled_linear_int8,
)


class ExpertsScheme(ABC):
    """The format of weights and activations."""

    name: ClassVar[str]

    @abstractmethod
    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of x: [..., K] -> [..., K] and [..., S] fp32; without codes x, None."""

    @abstractmethod
    def linear(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """x [M, K], weight [N, K] of one expert -> [M, N] in out_dtype."""


@dataclass(frozen=True)
class Unquantized(ExpertsScheme):
    """16 bits or fp32."""

    name = "none"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, None

    def linear(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        return F.linear(x, weight, bias)


@dataclass(frozen=True)
class Fp8PerToken(ExpertsScheme):
    """fp8 with a scale per row of activations, and one per output or one per expert of weights."""

    name = "fp8"
    dtype: torch.dtype = torch.float8_e4m3fn

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quant_fp8_per_token.reference(x, self.dtype)

    def linear(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        assert x_scale is not None and weight_scale is not None
        flat = weight_scale.flatten() if weight_scale.numel() == 1 else weight_scale
        return scaled_linear_fp8.reference(x, weight, x_scale, flat, bias, out_dtype=out_dtype)


@dataclass(frozen=True)
class Fp8PerBlock(ExpertsScheme):
    """fp8 with a scale per `block` columns of a row of activations, and per square of weights."""

    name = "fp8_block"
    dtype: torch.dtype = torch.float8_e4m3fn
    block: int = 128

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quant_fp8_group.reference(x, self.block, dtype=self.dtype)

    def linear(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        assert x_scale is not None and weight_scale is not None
        return scaled_linear_fp8_block.reference(
            x, weight, x_scale, weight_scale, bias, out_dtype=out_dtype, block=self.block
        )


@dataclass(frozen=True)
class Int8PerToken(ExpertsScheme):
    """int8 with a scale per row of activations, and one per output of weights."""

    name = "int8"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return quant_int8_per_token.reference(x)

    def linear(
        self,
        x: Tensor,
        x_scale: Tensor | None,
        weight: Tensor,
        weight_scale: Tensor | None,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        assert x_scale is not None and weight_scale is not None
        return scaled_linear_int8.reference(
            x, weight, x_scale, weight_scale, bias, out_dtype=out_dtype
        )


SCHEMES: dict[str, ExpertsScheme] = {
    scheme.name: scheme for scheme in (Unquantized(), Fp8PerToken(), Fp8PerBlock(), Int8PerToken())
}
ALL_SCHEMES = tuple(SCHEMES)
