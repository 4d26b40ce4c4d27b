"""Quantized experts: their weights are created, loaded, converted and applied.

Parameters are named after those of transformers, with the scheme's tensors of each expert stacked:

    weight        gate_up_proj, down_proj
    weight_scale  gate_up_proj_scale, ...   [E, 1, 1] if the scheme has one number
    zeros         gate_up_proj_zeros, ...
    input_scale   gate_up_proj_input_scale, ...   [1], one for all experts
                  gate_up_proj_bias, ...
"""

import torch
from torch import Tensor, nn

from atomc.ops.experts import Gate
from atomc.quantization.experts_spec import ExpertsSpec
from atomc.quantization.layer_weights import Shapes, Tensors
from atomc.quantization.linear import Method, QuantizedLayer
from atomc.quantization.nvfp4 import Nvfp4

STACKED = ("gate_up_proj", "down_proj")
SUFFIXES = {
    "weight": "",
    "weight_scale": "_scale",
    "zeros": "_zeros",
    "input_scale": "_input_scale",
}


class ExpertsMethod(Method):
    """Creates and quantizes the weights of experts. The format is that of each projection of an
    expert.
    """

    def refuses(self, spec: ExpertsSpec) -> str | None:
        """Why the scheme does not support experts of these sizes, or None."""
        if isinstance(self.scheme, Nvfp4):
            return "no kernel multiplies experts of NVFP4"
        reasons = (self.scheme.refuses(*size) for size in sizes(spec).values())
        return next((reason for reason in reasons if reason), None)

    def create_weights(
        self, layer: "QuantizedExperts", dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Empty parameters of the scheme, stacked."""
        for projection, size in sizes(layer.spec).items():
            tensors = self.scheme.tensors(*size, dtype)
            for name, (shape, kind) in stacked(projection, tensors, layer.spec.num_experts).items():
                layer.set(name, torch.empty(shape, dtype=kind, device=device))

    def quantize(self, projection: str, weights: Tensor) -> Tensors:
        """The stacked tensors of a projection with weights [E, N, K], one expert at a time."""
        by_name: Tensors = {}
        for e, weight in enumerate(weights):
            [tensors] = self.scheme.quantize([weight.contiguous()])
            put(by_name, projection, tensors, e, len(weights))
        return by_name


class QuantizedExperts(QuantizedLayer):
    """A mixture of gated experts with quantized weights: each [E, ...] of the scheme's tensors, but
    the input scales are [1]. Parameters that the scheme lacks are not set.
    """

    BIASES = ("gate_up_proj_bias", "down_proj_bias")

    gate_up_proj: nn.Parameter
    gate_up_proj_scale: nn.Parameter
    gate_up_proj_zeros: nn.Parameter
    gate_up_proj_input_scale: nn.Parameter
    gate_up_proj_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_proj_scale: nn.Parameter
    down_proj_zeros: nn.Parameter
    down_proj_input_scale: nn.Parameter
    down_proj_bias: nn.Parameter | None

    def __init__(self, spec: ExpertsSpec, method: ExpertsMethod):
        super().__init__()
        self.spec, self.method = spec, method
        for name in self.BIASES:
            self.register_parameter(name, None)

    @property
    def gate(self) -> Gate:
        return self.spec.gate

    @property
    def codes_and_scales(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of gate_up_proj, and of down_proj."""
        return self.gate_up_proj, self.gate_up_proj_scale, self.down_proj, self.down_proj_scale

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        return self.gate_up_proj_bias, self.down_proj_bias

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, H] through experts ids [T, k], summed with weights [T, k] -> [T, H]."""
        return self.method.scheme.apply_experts(self, x, ids, weights)

    def dequantized(self, projection: str) -> Tensor:
        """The dequantized weights of gate_up_proj, fp32 [E, 2I, H], or of down_proj, [E, H, I]."""
        stored = {
            name: self.get_parameter(projection + suffix)
            for name, suffix in SUFFIXES.items()
            if name != "input_scale" and projection + suffix in self._parameters
        }
        experts = range(self.spec.num_experts)
        weights = [{name: tensor[e] for name, tensor in stored.items()} for e in experts]
        return torch.stack([self.method.scheme.dequantize(weight) for weight in weights])

    def extra_repr(self) -> str:
        spec = self.spec
        return (
            f"{spec.num_experts} of {spec.hidden_size} x {spec.intermediate_size}, "
            f"{self.gate['activation']}, bias={spec.has_bias}, {self.method.scheme.description}"
        )


def sizes(spec: ExpertsSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the stacked projections of an expert."""
    hidden, width = spec.hidden_size, spec.intermediate_size
    return {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}


def stacked(projection: str, tensors: Shapes, num_experts: int) -> Shapes:
    """Name of a parameter -> its shape and dtype, from those of one expert's tensors."""
    return {
        projection + SUFFIXES[name]: (_stacked_shape(name, shape, num_experts), kind)
        for name, (shape, kind) in tensors.items()
    }


def _stacked_shape(name: str, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
    if name == "input_scale":
        return shape
    return (num_experts, *(shape if len(shape) > 1 else (1, 1)))


def put(target: Tensors, projection: str, tensors: Tensors, expert: int, num_experts: int) -> None:
    """Copy the scheme's tensors of one expert into the stacked ones, which the first creates."""
    for name, tensor in tensors.items():
        key = projection + SUFFIXES[name]
        if key not in target:
            target[key] = tensor.new_empty(_stacked_shape(name, tuple(tensor.shape), num_experts))
        target[key][expert] = tensor
