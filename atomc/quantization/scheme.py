"""Quantization schemes: the tensors of a linear layer, how a weight is quantized, and the ops that
apply them.

A scheme's tensors are the parameters of its op, by name, with one row per output:
weight         [N, ...] codes
weight_scale   values are codes times scales
input_scale    [1] fp32, of a static scheme
zeros          [N, G] uint8, of asymmetric int4
global_scale   [N, 1] fp32, of NVFP4: a factor of all scales
N outputs, K inputs, G groups. Experts stack the tensors of two weights (QuantizedExperts): the
activation between them is quantized like the input.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from atomc import ops
from atomc.ops.formats import AMAX_FLOOR, grouped_columns, pack_int4
from atomc.ops.quant import rounded_fp8
from atomc.ops.scaled_linear import fp8_block_values, int4_weight, mxfp4_values
from atomc.quantization.layer_weights import Shapes, Tensors
from atomc.quantization.nvfp4 import Nvfp4

if TYPE_CHECKING:
    from atomc.quantization.experts import QuantizedExperts
    from atomc.quantization.linear import QuantizedLinear

E4M3 = torch.float8_e4m3fn


class Scheme(Protocol):
    """The interface of a scheme. `description` is its name in reports."""

    @property
    def description(self) -> str: ...

    @property
    def block_sizes(self) -> tuple[int, int]:
        """Outputs and inputs that share a scale or a word: a layer is divided only between them."""

    def refuses(self, out_features: int, in_features: int) -> str | None:
        """Why the scheme does not support a layer of this size, or None."""

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        """Shape and dtype of each tensor, in a model of that dtype."""

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        """The tensors of weights [N, K] of one input; a per-tensor scale is one shared tensor."""

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight with these tensors of the scheme, fp32 [N, K]."""

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        """The linear layer, as ops that rewrites can fuse. x [..., K] -> [..., N], in x.dtype."""

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        """Experts, as such ops. x [T, H], ids and weights [T, k] -> [T, H] in x.dtype."""


class EightBits:
    """What schemes of 8 bits share: they support layers of any size."""

    def refuses(self, out_features: int, in_features: int) -> str | None:
        return None

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].to(torch.float32) * tensors["weight_scale"]


@dataclass(frozen=True)
class Fp8(EightBits):
    """e4m3 weights, a scale per tensor or output; activations with a static scale or one per row.

    weight      "tensor" or "channel"
    activation  "static" or "token"
    """

    weight: str = "tensor"
    activation: str = "token"
    dtype: torch.dtype = E4M3
    block_sizes: ClassVar[tuple[int, int]] = (1, 1)

    @property
    def description(self) -> str:
        return f"fp8 (weights per {self.weight}, activations {_per(self.activation)})"

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        scale = (1,) if self.weight == "tensor" else (out_features, 1)
        shapes: Shapes = {
            "weight": ((out_features, in_features), self.dtype),
            "weight_scale": (scale, torch.float32),
        }
        return shapes | (
            {"input_scale": ((1,), torch.float32)} if self.activation == "static" else {}
        )

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        if self.weight == "channel":
            return _named(ops.quant_fp8_per_token.reference(x, self.dtype) for x in weights)
        amax = (
            torch.stack([weight.abs().max().to(torch.float32) for weight in weights])
            .max()
            .clamp(min=AMAX_FLOOR)
        )
        scale = (amax / torch.finfo(self.dtype).max).reshape(1)
        return [
            {
                "weight": rounded_fp8(weight.to(torch.float32) * (1.0 / scale), self.dtype),
                "weight_scale": scale,
            }
            for weight in weights
        ]

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        if self.activation == "static":
            scale: Tensor = layer.input_scale
            q = ops.quant_fp8_static(x, scale, layer.weight.dtype)
        else:
            q, scale = ops.quant_fp8_per_token(x, layer.weight.dtype)
        return ops.scaled_linear_fp8(
            q, layer.weight, scale, layer.weight_scale, layer.bias, out_dtype=x.dtype
        )

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        dtype, act_scale = layer.gate_up_proj.dtype, None
        if self.activation == "static":
            scale: Tensor = layer.gate_up_proj_input_scale
            q, act_scale = ops.quant_fp8_static(x, scale, dtype), layer.down_proj_input_scale
        else:
            q, scale = ops.quant_fp8_per_token(x, dtype)
        return ops.moe_experts_fp8(
            q,
            scale,
            ids,
            weights,
            *layer.codes_and_scales,
            *layer.biases,
            act_scale,
            out_dtype=x.dtype,
            **layer.gate,
        )


@dataclass(frozen=True)
class Fp8Block(EightBits):
    """e4m3 with a scale per 128 x 128 weights, and per 1 x 128 activations (DeepSeek-V3)."""

    dtype: torch.dtype = E4M3
    block: ClassVar[int] = 128
    block_sizes: ClassVar[tuple[int, int]] = (128, 128)
    description: ClassVar[str] = "fp8 (weights per 128 x 128, activations per 1 x 128)"

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        squares = -(-out_features // self.block), -(-in_features // self.block)
        return {
            "weight": ((out_features, in_features), self.dtype),
            "weight_scale": (squares, torch.float32),
        }

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        return [self._quantize(weight.to(torch.float32)) for weight in weights]

    def _quantize(self, weight: Tensor) -> Tensors:
        (rows, columns), block = weight.shape, self.block
        padded = torch.nn.functional.pad(weight, (0, -columns % block, 0, -rows % block))
        squares = padded.view(-(-rows // block), block, -1, block)
        scale = (
            squares.abs().amax((1, 3), keepdim=True).clamp(min=AMAX_FLOOR)
            / torch.finfo(self.dtype).max
        )
        codes = rounded_fp8(squares * (1.0 / scale), self.dtype).view(padded.shape)[:rows, :columns]
        if codes.shape != padded.shape:  # without the memory of the padding
            codes = codes.clone(memory_format=torch.contiguous_format)
        return {"weight": codes, "weight_scale": scale[:, 0, :, 0].contiguous()}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return fp8_block_values(tensors["weight"], tensors["weight_scale"], self.block)

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        q, scale = ops.quant_fp8_group(x, self.block, dtype=layer.weight.dtype)
        return ops.scaled_linear_fp8_block(
            q,
            layer.weight,
            scale,
            layer.weight_scale,
            layer.bias,
            out_dtype=x.dtype,
            block=self.block,
        )

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        q, scale = ops.quant_fp8_group(x, self.block, dtype=layer.gate_up_proj.dtype)
        return ops.moe_experts_fp8(
            q,
            scale,
            ids,
            weights,
            *layer.codes_and_scales,
            *layer.biases,
            out_dtype=x.dtype,
            block=self.block,
            **layer.gate,
        )


@dataclass(frozen=True)
class Int8(EightBits):
    """Symmetric int8 weights with a scale per output, activations with a scale per row."""

    block_sizes: ClassVar[tuple[int, int]] = (1, 1)
    description: ClassVar[str] = "int8 (weights per channel, activations per token)"

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        return {
            "weight": ((out_features, in_features), torch.int8),
            "weight_scale": ((out_features, 1), torch.float32),
        }

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        return _named(ops.quant_int8_per_token.reference(weight) for weight in weights)

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        q, scale = ops.quant_int8_per_token(x)
        return ops.scaled_linear_int8(
            q, layer.weight, scale, layer.weight_scale, layer.bias, out_dtype=x.dtype
        )

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        q, scale = ops.quant_int8_per_token(x)
        return ops.moe_experts_int8(
            q,
            scale,
            ids,
            weights,
            *layer.codes_and_scales,
            *layer.biases,
            out_dtype=x.dtype,
            **layer.gate,
        )


@dataclass(frozen=True)
class Int4:
    """4-bit integer weights with a scale per group of inputs; activations are not quantized.

    zeros  each group has a zero point; else the codes stand for -8..7
    """

    group: int = 32
    zeros: bool = False
    GROUPS: ClassVar[tuple[int, ...]] = (32, 64, 128)

    @property
    def block_sizes(self) -> tuple[int, int]:
        return 1, self.group

    @property
    def description(self) -> str:
        return (
            f"int4 (groups of {self.group}{', zero points' if self.zeros else ''}, "
            "activations 16-bit)"
        )

    def refuses(self, out_features: int, in_features: int) -> str | None:
        if in_features % self.group:
            return f"{in_features} inputs are not a multiple of the group size {self.group}"
        return None

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        groups = in_features // self.group
        shapes: Shapes = {
            "weight": ((out_features, in_features // 8), torch.int32),
            "weight_scale": ((out_features, groups), dtype),
        }
        return shapes | ({"zeros": ((out_features, groups), torch.uint8)} if self.zeros else {})

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        return [self._quantize(weight) for weight in weights]

    def _quantize(self, weight: Tensor) -> Tensors:
        groups = grouped_columns(weight.to(torch.float32), self.group)
        # The range -8..7 has 15 steps: 7.5 on each side minimizes the largest error.
        scale = (groups.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR) / 7.5).to(weight.dtype)
        codes = (groups / scale.to(torch.float32)).round().clamp(-8, 7) + 8
        return {"weight": pack_int4(codes.flatten(-2)), "weight_scale": scale.squeeze(-1)}

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return int4_weight(
            tensors["weight"], tensors["weight_scale"], tensors.get("zeros"), self.group
        )

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        zeros = layer.zeros if self.zeros else None
        return ops.linear_w4a16(
            x, layer.weight, layer.weight_scale, zeros, layer.bias, group=self.group
        )

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        return ops.moe_experts_w4a16(
            x,
            ids,
            weights,
            *layer.codes_and_scales,
            layer.gate_up_proj_zeros if self.zeros else None,
            layer.down_proj_zeros if self.zeros else None,
            *layer.biases,
            group=self.group,
            **layer.gate,
        )


@dataclass(frozen=True)
class Mxfp4:
    """e2m1 weights with a power-of-two scale per 32 inputs.

    activation  "mxfp4", "fp8" (a scale per row) or "16-bit"
    rounding    of the scales, see atomc.ops.quant_mxfp4
    """

    activation: str = "mxfp4"
    rounding: str = "even"
    block_sizes: ClassVar[tuple[int, int]] = (1, 32)

    @property
    def description(self) -> str:
        return f"mxfp4 (activations {self.activation})"

    def refuses(self, out_features: int, in_features: int) -> str | None:
        return (
            f"{in_features} inputs are not a multiple of 32, the group size of MXFP4"
            if in_features % 32
            else None
        )

    def tensors(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        return {
            "weight": ((out_features, in_features // 2), torch.uint8),
            "weight_scale": ((out_features, in_features // 32), torch.uint8),
        }

    def quantize(self, weights: Sequence[Tensor]) -> list[Tensors]:
        return _named(ops.quant_mxfp4.reference(weight, self.rounding) for weight in weights)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return mxfp4_values(tensors["weight"], tensors["weight_scale"])

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x and its scale, as the activation says."""
        if self.activation == "mxfp4":
            return ops.quant_mxfp4(x, self.rounding)
        if self.activation == "fp8":
            return ops.quant_fp8_per_token(x)
        return x, None

    def apply(self, layer: "QuantizedLinear", x: Tensor) -> Tensor:
        q, scale = self._quantized(x)
        return ops.linear_mxfp4(
            q, layer.weight, layer.weight_scale, scale, layer.bias, out_dtype=x.dtype
        )

    def apply_experts(
        self, layer: "QuantizedExperts", x: Tensor, ids: Tensor, weights: Tensor
    ) -> Tensor:
        q, scale = self._quantized(x)
        return ops.moe_experts_mxfp4(
            q,
            ids,
            weights,
            *layer.codes_and_scales,
            *layer.biases,
            scale,
            out_dtype=x.dtype,
            **layer.gate,
        )


# The schemes of `quantization=` and atomc.quantize.
ONLINE: dict[str, Scheme] = {
    "fp8": Fp8(),
    "fp8_per_token": Fp8("channel"),
    "fp8_block": Fp8Block(),
    "int8": Int8(),
    "int4": Int4(),
    "mxfp4": Mxfp4(),
    "mxfp4_a16": Mxfp4("16-bit"),
    "nvfp4_a16": Nvfp4(),
}


def _named(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Tensors]:
    """The tensors of weights with these codes and scales."""
    return [{"weight": codes, "weight_scale": scale} for codes, scale in pairs]


def _per(activation: str) -> str:
    return "static" if activation == "static" else f"per {activation}"


def convert_to_fnuz(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert e4m3fn codes and their scale to e4m3fnuz codes and scale with the same values.

    The same bits have half the value in e4m3fnuz; negative zero, which is NaN there, becomes zero.
    """
    bits = codes.view(torch.uint8)
    bits = torch.where(bits == 0x80, 0, bits)
    doubled = (
        torch.where(scale == 255, scale, scale + 1) if scale.dtype == torch.uint8 else scale * 2.0
    )
    return bits.view(torch.float8_e4m3fnuz), doubled
