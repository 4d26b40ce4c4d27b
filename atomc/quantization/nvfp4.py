"""The scheme NVFP4: weights of four bits with two levels of scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import AMAX_FLOOR, NVFP4_GROUP, e2m1_codes, grouped_columns, pack_e2m1
from atomc.ops.scaled_linear import nvfp4_values
from atomc.quantization.layer_weights import Shapes, Tensors

if TYPE_CHECKING:
    from atomc.quantization.experts import QuantizedExperts
    from atomc.quantization.linear import QuantizedLinear

E4M3 = torch.float8_e4m3fn
E2M1_MAX = 6.0


@dataclass(frozen=True)
class Nvfp4:
    """e2m1 weights with an e4m3 scale per 16 inputs and one fp32 factor of these scales;
    activations are not quantized.
    """

    block_sizes: ClassVar[tuple[int, int]] = (1, NVFP4_GROUP)
    description: ClassVar[str] = "nvfp4 (activations 16-bit)"

    def refuses(self, out_features: int, in_features: int) -> str | None:
        return (
            f"{in_features} inputs are not a multiple of {NVFP4_GROUP}, the group size of NVFP4"
            if in_features % NVFP4_GROUP
            else None
        )

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        return {
            "weight": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, in_features // NVFP4_GROUP), E4M3),
            "global_scale": ((out_features, 1), torch.float32),
        }

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        return [self._quantize(weight.to(torch.float32)) for weight in weights]

    def _quantize(self, weight: Tensor) -> Tensors:
        groups = grouped_columns(weight, NVFP4_GROUP)
        amax = groups.abs().amax(-1)
        # The largest scale of the weight is the largest number of e4m3.
        factor = amax.max().clamp(min=AMAX_FLOOR) / (E2M1_MAX * torch.finfo(E4M3).max)
        # At least the smallest number of e4m3: no scale is zero.
        scale = (amax / (E2M1_MAX * factor)).clamp(min=2.0**-9).to(E4M3)
        codes = e2m1_codes(groups / (scale.to(torch.float32) * factor).unsqueeze(-1))
        return {
            "weight": pack_e2m1(codes.flatten(-2)),
            "weight_scale": scale,
            "global_scale": factor.repeat(len(weight), 1),
        }

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return nvfp4_values(tensors["weight"], tensors["weight_scale"], tensors["global_scale"])

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        return ops.linear_nvfp4(x, layer.weight, layer.weight_scale, layer.global_scale, layer.bias)

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        raise AssertionError("experts of NVFP4 are refused before they are created")
