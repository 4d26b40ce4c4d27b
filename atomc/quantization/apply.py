"""Replaces linear layers and experts by quantized ones, before or after weights are loaded."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from atomc.platform import Platform
from atomc.quantization.config import QuantizationConfig, online
from atomc.quantization.experts import STACKED, ExpertsMethod, QuantizedExperts
from atomc.quantization.experts_spec import is_experts, spec_of
from atomc.quantization.kept_layers import kept_layers, unwrapped
from atomc.quantization.linear import LinearMethod, QuantizedLinear, share_scales, siblings_of
from atomc.quantization.scheme import Fp8, Fp8Block, convert_to_fnuz
from atomc.quantization.stored_experts import create_stored, expect_scales, stack_stored
from atomc.weights.registry import parameter_of

log = logging.getLogger("atomc")
T = TypeVar("T")


@dataclass(frozen=True)
class Methods:
    """Name -> method of the layers to quantize, in the order of the model."""

    linears: Mapping[str, LinearMethod] = field(default_factory=dict)
    experts: Mapping[str, ExpertsMethod] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.linears or self.experts)


def methods_of(model: nn.Module, config: QuantizationConfig, strip: str = "") -> Methods:
    """The layers to quantize. `strip`: a prefix not in checkpoints.

    A layer whose weight is tied to another parameter (a head to the embedding) is not quantized.
    Raises ValueError for a layer that the config names and that cannot be quantized.
    """
    owners: dict[int, int] = {}
    for _, weight in model.named_parameters(remove_duplicate=False):
        owners[id(weight)] = owners.get(id(weight), 0) + 1
    unquantized = kept_layers(model, online=config.online)
    linears: dict[str, LinearMethod] = {}
    experts: dict[str, ExpertsMethod] = {}
    for name, layer in model.named_modules():
        if name in unquantized:
            continue
        prefix = unwrapped(name.removeprefix(strip))
        if type(layer) is nn.Linear:
            alone = owners.get(id(layer.weight)) == 1 and not is_quantized_by_library(layer)
            if alone and (method := config.get_quant_method(layer, prefix)):
                linears[name] = method
        elif (
            is_experts(layer)
            and _is_alone(layer, owners)
            and (of_experts := config.get_experts_method(layer, prefix))
        ):
            experts[name] = of_experts
    return Methods(linears, experts)


def _is_alone(layer: nn.Module, owners: Mapping[int, int]) -> bool:
    return all(owners[id(x)] == 1 for x in layer._parameters.values() if x is not None)


def linear(model: nn.Module, name: str) -> nn.Linear:
    """The linear layer of this name, which is not quantized yet."""
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), name
    return layer


def replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, layer)


def create_weights(
    model: nn.Module, methods: Methods, dtype: torch.dtype, stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Replace layers by quantized ones on meta, with parameters as in a checkpoint.

    stored  name -> shape of its tensors
    Raises ValueError, naming the layer, for experts that cannot be stored in this way.
    """
    for name, method in methods.linears.items():
        old = linear(model, name)
        layer = QuantizedLinear(old.in_features, old.out_features, old.bias, method)
        method.create_weights(layer, dtype, "meta")
        replace(model, name, layer)
    for name, of_experts in methods.experts.items():
        stacked = any(f"{name}.{projection}" in stored for projection in STACKED)
        quantized_experts = create_experts(model, name, of_experts, dtype, stacked=stacked)
        shapes = {key: stored.get(f"{name}.{key}", ()) for key in quantized_experts._parameters}
        expect_scales(quantized_experts, shapes)


def create_experts(
    model: nn.Module, name: str, method: ExpertsMethod, dtype: torch.dtype, *, stacked: bool
) -> QuantizedExperts:
    """Replace experts by quantized ones on meta, which are returned: with the stacked tensors of
    the scheme, or with those of each projection as a checkpoint stores them.
    """
    old = model.get_submodule(name)
    layer = QuantizedExperts(spec_of(old), method)
    if stacked:
        method.create_weights(layer, dtype, "meta")
        move_biases(old, layer)
    else:
        try:
            create_stored(layer, dtype)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    replace(model, name, layer)
    return layer


def move_biases(old: nn.Module, layer: QuantizedExperts) -> None:
    for name in layer.BIASES:
        bias = old._parameters.get(name)
        if bias is not None:
            bias.requires_grad_(False)
            layer.register_parameter(name, bias)


def drop_optional(model: nn.Module, stored: Collection[str]) -> None:
    """Delete the optional parameters that this checkpoint does not have."""
    for name, layer in quantized(model):
        for optional in layer.method.optional:
            if f"{name}.{optional}" not in stored:
                del layer._parameters[optional]
    leaves = {name.rpartition(".")[2] for name in stored}
    for _, experts in quantized_experts(model):
        for optional in experts.method.optional:
            for child in experts.children():
                if optional not in leaves:
                    child._parameters.pop(optional, None)


def quantized(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            yield name, layer


def quantized_experts(model: nn.Module) -> Iterator[tuple[str, QuantizedExperts]]:
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedExperts):
            yield name, layer


def process_weights_after_loading(model: nn.Module) -> None:
    """Convert the stored tensors of each layer to those of its scheme, one layer at a time;
    siblings then share scales.

    Raises ValueError, naming the layer, for tensors that contradict the config.
    """
    layers: list[tuple[str, QuantizedLinear | QuantizedExperts]]
    layers = [*quantized(model), *quantized_experts(model)]
    for name, layer in layers:
        try:
            if isinstance(layer, QuantizedExperts):
                stack_stored(layer)
            else:
                layer.method.process_weights_after_loading(layer)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        convert_to_device_fp8(layer, layer_device(layer))
    for group in groups(dict(quantized(model))):
        share_scales([layer for _, layer in group])


def groups(layers: Mapping[str, T]) -> list[list[tuple[str, T]]]:
    """The layers, grouped by their input."""
    by_siblings: dict[tuple[str, ...], list[tuple[str, T]]] = {}
    for name, layer in layers.items():
        by_siblings.setdefault(siblings_of(name), []).append((name, layer))
    return list(by_siblings.values())


def layer_device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def convert_to_device_fp8(layer: QuantizedLinear | QuantizedExperts, device: torch.device) -> None:
    """Convert fp8 weights to the fp8 format of the device: e4m3fnuz on gfx942."""
    if not isinstance(layer.method.scheme, Fp8 | Fp8Block):
        return
    wanted = fp8_dtype(device)
    of_experts = [(name, f"{name}_scale", f"{name}_input_scale") for name in STACKED]
    of_linear = [("weight", "weight_scale", "input_scale")]
    for name, scale_name, input_scale in (
        of_experts if isinstance(layer, QuantizedExperts) else of_linear
    ):
        weight, scale = layer.get_parameter(name).data, layer.get_parameter(scale_name).data
        if weight.dtype != wanted:
            weight, scale = convert_to_fnuz(weight, scale)
            layer.set(name, weight)
            layer.set(scale_name, scale)
            if input_scale in layer._parameters:
                layer.set(input_scale, layer.get_parameter(input_scale).data * 2.0)


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
    originals = [
        layer.weight.data if weight is None else weight
        for layer, weight in zip(old, weights, strict=True)
    ]
    scheme = methods[names[0]].scheme
    tensors = scheme.quantize(originals)
    shared: dict[int, nn.Parameter] = {}
    quantized_layers = []
    for name, layer, layer_tensors in zip(names, old, tensors, strict=True):
        quantized_layer = QuantizedLinear(
            layer.in_features, layer.out_features, layer.bias, methods[name]
        )
        quantized_layer.train(layer.training)
        # A tensor shared by several layers becomes a parameter shared by them.
        quantized_layer.replace_parameters(
            {
                key: shared.setdefault(id(tensor), parameter_of(tensor))
                for key, tensor in layer_tensors.items()
            }
        )
        convert_to_device_fp8(quantized_layer, originals[0].device)
        replace(model, name, quantized_layer)
        quantized_layers.append(quantized_layer)
    share_scales(quantized_layers)


def quantize_experts(model: nn.Module, name: str, method: ExpertsMethod) -> None:
    """Replace experts by quantized ones, one expert at a time; the weights are freed."""
    old = model.get_submodule(name)
    spec = spec_of(old)
    layer = QuantizedExperts(spec, method)
    layer.train(old.training)
    move_biases(old, layer)
    for projection in STACKED:
        weight = old.get_parameter(projection).data
        if spec.transposed:
            weight = weight.mT
        for key, tensor in method.quantize(projection, weight).items():
            layer.set(key, tensor)
        device = weight.device
        del old._parameters[projection], weight
    convert_to_device_fp8(layer, device)
    replace(model, name, layer)


def quantize(model: nn.Module, scheme: str, ignore: Sequence[str] = ()) -> nn.Module:
    """Quantize the linear layers and experts of a model in place, and return it.

    scheme  "fp8", "fp8_per_token", "fp8_block", "int8", "int4", "mxfp4", "mxfp4_a16" or
            "nvfp4_a16"
    ignore  patterns of layers to skip, as in checkpoints: "down_proj", "model.layers.0",
            "re:.*self_attn.*"

    Embeddings, weights tied to them, lm_head, the routers of experts, the gates of gated delta nets
    and vision encoders are not quantized. Layers that are already quantized (by transformers or
    atomc) are unchanged, with a line in the log.
    Raises ValueError for an unknown scheme, a layer that the scheme does not support, experts that
    no op of atomc computes, and a model without a layer to quantize.
    """
    config = online(scheme, ignore)
    methods = methods_of(model, config, "hf_model." if hasattr(model, "hf_model") else "")
    foreign = sorted(
        {type(layer).__name__ for layer in model.modules() if is_quantized_by_library(layer)}
    )
    if foreign:
        log.warning(
            "quantize: layers of type %s are already quantized and are not changed",
            ", ".join(foreign),
        )
    hooked = [name for name in methods.linears if linear(model, name)._forward_hooks]
    if hooked:
        raise ValueError(
            f"{hooked[0]} has a hook, which its quantized layer would not have: quantize the model "
            "first, then divide it over ranks or register hooks"
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
    quantize_all(model, methods)
    return model


def quantize_all(model: nn.Module, methods: Methods) -> None:
    """Quantize loaded weights, the layers of one input or the experts of one layer at a time."""
    for group in groups(methods.linears):
        quantize_layers(model, [name for name, _ in group], methods.linears)
    for name, method in methods.experts.items():
        quantize_experts(model, name, method)


def is_quantized_by_library(layer: nn.Module) -> bool:
    """Whether another library quantized this layer: a weight has an 8-bit dtype, a tensor
    subclass, or is packed.
    """
    if isinstance(layer, QuantizedLinear | QuantizedExperts):
        return False
    weights = [layer._parameters.get(name) for name in ("weight", *STACKED)]
    few = any(
        weight is not None
        and (weight.dtype.itemsize == 1 or type(weight) not in (nn.Parameter, Tensor))
        for weight in weights
    )
    tensor_names = {*layer._parameters, *layer._buffers}
    return few or bool(
        tensor_names & {"weight_packed", "qweight", "weight_scale", "weight_scale_inv"}
    )
