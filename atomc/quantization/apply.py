"""Replaces linear layers by quantized ones, before loading weights or from loaded weights."""

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from atomc.platform import Platform
from atomc.quantization.config import QuantizationConfig, online
from atomc.quantization.linear import LinearMethod, QuantizedLinear, share_scales, siblings_of
from atomc.quantization.scheme import Fp8, Fp8Block, as_fnuz
from atomc.weights.registry import parameter_of

log = logging.getLogger("atomc")
T = TypeVar("T")


def linears(
    model: nn.Module, config: QuantizationConfig, strip: str = ""
) -> dict[str, LinearMethod]:
    """Name -> method of the linear layers to quantize, in the order of the model. `strip`: a prefix
    not in checkpoints.

    A layer whose weight is tied to another parameter (a head to the embedding) is not quantized.
    """
    owners: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        owners[id(weight)] = owners.get(id(weight), 0) + 1
    found = {}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and owners.get(id(layer.weight)) == 1:
            method = config.get_quant_method(layer, name.removeprefix(strip))
            if method is not None:
                found[name] = method
    return found


def linear(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of this name, which is not quantized yet."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), name
    return layer


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, layer)


def create_weights(
    model: nn.Module, methods: Mapping[str, LinearMethod], dtype: torch.dtype
) -> None:
    """Replace linear layers by quantized ones on meta."""
    for name, method in methods.items():
        old = linear(model, name)
        layer = QuantizedLinear(old.in_features, old.out_features, old.bias, method)
        method.create_weights(layer, dtype, "meta")
        replace(model, name, layer)


def drop_optional(model: nn.Module, stored: Container[str]) -> None:
    """Delete the optional parameters that this checkpoint does not have."""
    for name, layer in quantized(model):
        for optional in layer.method.format.optional if layer.method.format else ():
            if f"{name}.{optional}" not in stored:
                del layer._parameters[optional]


def quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            yield name, layer


def process_weights_after_loading(model: nn.Module) -> None:
    """Convert the stored tensors of each layer to those of its scheme, one layer at a time;
    siblings then share scales.

    Raises ValueError, naming the layer, for tensors that contradict the config.
    """
    for name, layer in quantized(model):
        try:
            layer.method.process_weights_after_loading(layer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        convert_to_device_fp8(layer, layer_device(layer))
    for group in groups(dict(quantized(model))):
        share_scales([layer for _, layer in group])


def groups(layers: Mapping[str, T]) -> list[list[tuple[str, T]]]:
    """The layers, grouped by their input."""
    found: dict[tuple[str, ...], list[tuple[str, T]]] = {}
    for name, layer in layers.items():
        found.setdefault(siblings_of(name), []).append((name, layer))
    return list(found.values())


def layer_device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def convert_to_device_fp8(layer: QuantizedLinear, device: torch.device) -> None:
    """Convert fp8 weights to the fp8 format of the device: e4m3fnuz on gfx942."""
    if isinstance(layer.method.scheme, Fp8 | Fp8Block) and fp8_dtype(device) != layer.weight.dtype:
        weight, scale = as_fnuz(layer.weight.data, layer.weight_scale.data)
        layer.set("weight", weight)
        layer.set("weight_scale", scale)
        if "input_scale" in layer._parameters:
            layer.set("input_scale", layer.input_scale.data * 2.0)


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The e4m3 format that the device supports."""
    if device.type == "cuda" and torch.version.hip and Platform.detect("cuda").arch == "gfx942":
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def quantize_layers(
    model: nn.Module,
    names: Sequence[str],
    methods: Mapping[str, LinearMethod],
    weight_of: Callable[[str], Tensor | None] | None = None,
) -> None:
    """Replace these layers, which share an input and a scheme, by quantized ones.

    weight_of  gives the weight of a layer that does not hold it
    """
    old = [linear(model, name) for name in names]
    weights = [(weight_of(name) if weight_of else None) for name in names]
    given = [
        layer.weight.data if weight is None else weight
        for layer, weight in zip(old, weights, strict=True)
    ]
    scheme = methods[names[0]].scheme
    tensors = scheme.quantize(given)
    shared: dict[int, nn.Parameter] = {}
    quantized_layers = []
    for name, layer, made in zip(names, old, tensors, strict=True):
        bias = layer.bias
        if bias is not None:
            bias.requires_grad_(False)
        quantized_layer = QuantizedLinear(
            layer.in_features, layer.out_features, bias, methods[name]
        )
        quantized_layer.train(layer.training)
        # A tensor shared by several layers becomes a parameter shared by them.
        quantized_layer.replace_parameters(
            {
                key: shared.setdefault(id(tensor), parameter_of(tensor))
                for key, tensor in made.items()
            }
        )
        convert_to_device_fp8(quantized_layer, given[0].device)
        replace(model, name, quantized_layer)
        quantized_layers.append(quantized_layer)
    share_scales(quantized_layers)


def quantize(model: nn.Module, scheme: str, ignore: Sequence[str] = ()) -> nn.Module:
    """Quantize the linear layers of a model in place, and return it.

    scheme  "fp8", "fp8_per_token", "fp8_block", "int8", "int4", "mxfp4" or "mxfp4_a16"
    ignore  patterns of layers to skip, as in checkpoints: "down_proj", "model.layers.0",
            "re:.*self_attn.*"

    Embeddings, weights tied to them, and lm_head are not quantized. Layers that are already
    quantized (by transformers or atomc) are unchanged, with a line in the log. Raises ValueError
    for an unknown scheme, a layer that the scheme does not support, and a model without a layer to
    quantize.
    """
    config = online(scheme, ignore)
    methods = linears(model, config, "hf_model." if hasattr(model, "hf_model") else "")
    foreign = sorted(
        {type(layer).__name__ for layer in model.modules() if is_quantized_by_library(layer)}
    )
    if foreign:
        log.warning(
            "quantize: layers of type %s are already quantized and are not changed",
            ", ".join(foreign),
        )
    if not methods:
        raise ValueError(
            f"{type(model).__name__} has no linear layer to quantize to {scheme!r}"
            + (
                f": its layers are already {', '.join(foreign)}"
                if foreign
                else f"; ignored are {', '.join(config.ignore)}"
            )
        )
    for group in groups(methods):
        quantize_layers(model, [name for name, _ in group], methods)
    return model


def is_quantized_by_library(layer: nn.Module) -> bool:
    """Whether another library quantized this layer: its weight has an 8-bit dtype, a tensor
    subclass, or is packed.
    """
    if isinstance(layer, QuantizedLinear):
        return False
    weight = layer._parameters.get("weight")
    few = weight is not None and (
        weight.dtype.itemsize == 1 or type(weight) not in (nn.Parameter, Tensor)
    )
    own = {*layer._parameters, *layer._buffers}
    return few or bool(own & {"weight_packed", "qweight", "weight_scale", "weight_scale_inv"})
