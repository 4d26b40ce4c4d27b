"""The quantized linear layer, and the steps of its weights: created, loaded, converted, applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from atomc.quantization.kept_layers import unwrapped
from atomc.quantization.layer_weights import Shapes, Tensors
from atomc.quantization.scheme import Fp8, Scheme
from atomc.weights.registry import parameter_of


@dataclass(frozen=True)
class Format:
    """How a kind of checkpoint stores a scheme's tensors, if it differs from the scheme.

    stored    (scheme, out, in, dtype) -> name -> shape and dtype
    convert   the stored tensors -> the scheme's
    optional  names that a checkpoint may omit
    """

    name: str
    stored: Callable[[Any, int, int, torch.dtype], Shapes]
    convert: Callable[[Any, Tensors], Tensors]
    optional: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Method:
    """How weights are stored, converted and applied.

    format  how a checkpoint stores a weight, if not as the scheme's tensors
    """

    scheme: Scheme
    format: Format | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def optional(self) -> frozenset[str]:
        """The stored tensors that a checkpoint may omit."""
        return self.format.optional if self.format else frozenset()

    def stored(self, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
        """Shape and dtype of each tensor of a weight in a checkpoint, in a model of that dtype."""
        if self.format is None:
            return self.scheme.tensors(out_features, in_features, dtype)
        return self.format.stored(self.scheme, out_features, in_features, dtype)


class LinearMethod(Method):
    """Creates and converts the weights of a linear layer."""

    def create_weights(
        self, layer: "QuantizedLinear", dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Empty parameters, named and shaped as the checkpoint stores them."""
        shapes = self.stored(layer.out_features, layer.in_features, dtype)
        for name, (shape, kind) in shapes.items():
            layer.set(name, torch.empty(shape, dtype=kind, device=device))

    def process_weights_after_loading(self, layer: "QuantizedLinear") -> None:
        """Convert the loaded tensors to the scheme's. Raises ValueError for a contradiction."""
        if self.format is None:
            return
        stored = {
            name: weight.data
            for name, weight in layer.named_parameters(recurse=False)
            if name != "bias" and not weight.is_meta
        }
        layer.replace_parameters(self.format.convert(self.scheme, stored))


class QuantizedLayer(nn.Module):
    """A layer whose parameters are codes and scales, which have no gradients, and biases."""

    BIASES: ClassVar[tuple[str, ...]] = ()

    def set(self, name: str, tensor: Tensor) -> None:
        self.register_parameter(name, parameter_of(tensor))

    def replace_parameters(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all parameters except biases by these."""
        for name in [name for name in self._parameters if name not in self.BIASES]:
            del self._parameters[name]
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.set(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """`.to(dtype)`, `.half()` and so on move codes and scales, but do not convert them."""
        biases = [self._parameters.get(name) for name in self.BIASES]

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return (
                result
                if result.dtype == tensor.dtype or any(tensor is bias for bias in biases)
                else tensor.to(result.device)
            )

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class QuantizedLinear(QuantizedLayer):
    """y = x @ weight.T + bias with a quantized weight. x [..., K] -> [..., N]. Parameters that its
    scheme lacks are not set.
    """

    BIASES = ("bias",)

    weight: nn.Parameter
    weight_scale: nn.Parameter
    input_scale: nn.Parameter
    zeros: nn.Parameter
    global_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: nn.Parameter | None, method: LinearMethod
    ):
        super().__init__()
        self.in_features, self.out_features, self.method = in_features, out_features, method
        if bias is not None:
            bias.requires_grad_(False)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.scheme.apply(self, x)

    def dequantized(self) -> Tensor:
        """The dequantized weight, fp32 [N, K]."""
        return self.method.scheme.dequantize(dict(self.named_parameters()))

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"{self.method.scheme.description}"
        )


# Names of layers that read the same input; they share a per-tensor scale.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)


def siblings_of(name: str) -> tuple[str, ...]:
    """The names of the layers that share an input with this one, including itself; without the
    adapters that peft puts around some of them.
    """
    parent, _, leaf = unwrapped(name).rpartition(".")
    group = next((group for group in SIBLINGS if leaf in group), (leaf,))
    return tuple(f"{parent}.{other}" if parent else other for other in group)


def share_scales(layers: Sequence[QuantizedLinear]) -> bool:
    """Give fp8 layers of one input that have a scale each the largest of them, as one parameter;
    whether it was done.

    Codes are rounded anew where the scale changes: values move by up to half a step of the larger
    scale.
    """
    scheme = layers[0].method.scheme
    if (
        len(layers) < 2
        or not isinstance(scheme, Fp8)
        or any(layer.method.scheme != scheme for layer in layers)
    ):
        return False
    names = ("weight_scale", "input_scale") if scheme.weight == "tensor" else ("input_scale",)
    shared = {name: largest for name in names if (largest := _largest(layers, name)) is not None}
    for layer in layers:
        if "weight_scale" in shared:
            _rescale(layer, shared["weight_scale"].data)
        for name, parameter in shared.items():
            layer.register_parameter(name, parameter)
    return bool(shared)


def _largest(layers: Sequence[QuantizedLinear], name: str) -> nn.Parameter | None:
    """The largest of the layers' scales of this name; None if there is none, or one is shared."""
    if name not in layers[0]._parameters:
        return None
    parts = [layer.get_parameter(name) for layer in layers]
    if all(part is parts[0] for part in parts):
        return None
    return parameter_of(torch.stack([part.data for part in parts]).max(0).values)


def _rescale(layer: QuantizedLinear, scale: Tensor) -> None:
    if not layer.weight_scale.equal(scale):
        values = layer.weight.to(torch.float32) * (layer.weight_scale / scale)
        largest = torch.finfo(layer.weight.dtype).max
        layer.set("weight", values.clamp(-largest, largest).to(layer.weight.dtype))
