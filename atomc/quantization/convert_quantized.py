"""Converts layers that transformers or torchao quantized to those of atomc, with their codes.

Other libraries keep the tensors of the checkpoint in a layer, under the same names: they are
converted like a checkpoint. torchao's weights are tensor subclasses (torchao.py).
"""

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from atomc.quantization import apply
from atomc.quantization.config import QuantizationConfig, parse
from atomc.quantization.experts import ExpertsMethod, QuantizedExperts
from atomc.quantization.experts_spec import spec_of
from atomc.quantization.linear import LinearMethod, QuantizedLayer, QuantizedLinear
from atomc.quantization.stored_experts import expect_scales
from atomc.quantization.torchao import is_of_torchao, read_weight

log = logging.getLogger("atomc")

BEFORE_FIRST_CALL = "before its first call, which unpacks what compressed-tensors holds"
INSTEAD = "load the checkpoint with atomc, which reads its experts"


def adopt(model: nn.Module) -> nn.Module:
    """Replace the linear layers and experts that transformers quantized, or the linear layers that
    torchao quantized, by QuantizedLinear and QuantizedExperts, in place, and return the model.
    Codes are not copied, unless torchao packs them in another way.

    Raises ValueError for a model that is not quantized, an unsupported format, and a layer without
    codes (compressed-tensors converts them to 16 bits in the first call), or with codes in the
    layout of a kernel; the model is unchanged then.
    """
    weights = {
        name: weight
        for name, layer in model.named_modules()
        for weight in layer._parameters.values()
        if is_of_torchao(weight)
    }
    if weights:
        return _convert_torchao(model, weights)
    config = _stored_config(model)
    dtype = next((x.dtype for x in model.parameters() if _is_float(x.dtype)), torch.bfloat16)
    converted = {
        name: _converted(name, layer, config, dtype)
        for name, layer in model.named_modules()
        if not isinstance(layer, QuantizedLayer)
    }
    _replace_layers(model, {name: layer for name, layer in converted.items() if layer is not None})
    unpacking = getattr(model, "ct_decompress_hook", None)  # of compressed-tensors
    if unpacking is not None:
        unpacking.remove()
    return model


def _stored_config(model: nn.Module) -> QuantizationConfig:
    """The config with which transformers quantized a model, which still has its codes."""
    name = type(model).__name__
    stored = getattr(getattr(model, "config", None), "quantization_config", None)
    if stored is None:
        raise ValueError(f"{name} is not quantized: pass the scheme to quantize it to")
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    if settings.get("quantization_status") == "decompressed":  # an enum that is a string
        raise ValueError(f"the layers of {name} are already unpacked: adopt it {BEFORE_FIRST_CALL}")
    if settings.get("dequantize"):
        raise ValueError(
            f"transformers has dequantized the layers of {name}: load the checkpoint with atomc, "
            "or where transformers keeps it quantized"
        )
    return parse(settings)


def _converted(
    name: str, layer: nn.Module, config: QuantizationConfig, dtype: torch.dtype
) -> QuantizedLayer | None:
    """The layer of atomc for a quantized linear layer or experts; None for any other module."""
    inputs, outputs = (getattr(layer, side, None) for side in ("in_features", "out_features"))
    if inputs is not None and outputs is not None:
        plain = nn.Linear(inputs, outputs, bias=False, device="meta")
        method = config.get_quant_method(plain, name)
        return None if method is None else _convert(name, layer, plain, method, config, dtype)
    if isinstance(getattr(layer, "down_proj", None), nn.Module | None):
        return None
    of_experts = config.rule_of_experts(type(layer).__name__, name)
    if of_experts is None:
        return None
    return _convert_experts(name, layer, of_experts, config, dtype)


def _replace_layers(model: nn.Module, layers: Mapping[str, QuantizedLayer]) -> None:
    for name, layer in layers.items():
        apply.replace(model, name, layer)
    apply.process_weights_after_loading(model)


def _convert_torchao(model: nn.Module, weights: Mapping[str, Tensor | None]) -> nn.Module:
    """weights: the quantized ones, by the name of their layer."""
    layers: dict[str, QuantizedLinear] = {}
    notes: dict[str, None] = {}
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear) or layer.weight is not weight:
            raise ValueError(
                f"{name} is of class {type(layer).__name__}, with a weight of torchao's class "
                f"{type(weight).__name__}, expected only linear layers with such weights"
            )
        try:
            scheme, tensors, note = read_weight(weight)
        except ValueError as error:
            raise ValueError(
                f"{name}: {error}; atomc.quantize(model, scheme) quantizes the original weights"
            ) from error
        layers[name] = QuantizedLinear(
            layer.in_features, layer.out_features, layer.bias, LinearMethod(scheme)
        )
        layers[name].train(layer.training).replace_parameters(tensors)
        notes |= {note: None} if note else {}
    for note in notes:
        log.warning("adopt: %s", note)
    _replace_layers(model, layers)
    return model


def _convert(
    name: str,
    layer: nn.Module,
    plain: nn.Linear,
    method: LinearMethod,
    config: QuantizationConfig,
    dtype: torch.dtype,
) -> QuantizedLinear:
    """A QuantizedLinear with the stored tensors of the layer. plain: a linear layer of its size."""
    bias = layer._parameters.get("bias")
    quantized = QuantizedLinear(plain.in_features, plain.out_features, bias, method)
    method.create_weights(quantized, dtype, "meta")
    quantized.train(layer.training)
    remedy = f"adopt the model {BEFORE_FIRST_CALL}"
    _take(name, quantized, _stored(layer, config), remedy, method.optional)
    return quantized


def _convert_experts(
    name: str,
    layer: nn.Module,
    method: ExpertsMethod,
    config: QuantizationConfig,
    dtype: torch.dtype,
) -> QuantizedExperts:
    """QuantizedExperts with the stored tensors of the layer."""
    try:
        spec = spec_of(layer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; {INSTEAD}") from error
    if reason := method.refuses(spec):
        raise ValueError(f"{name}: {reason}")
    quantized = QuantizedExperts(spec, method)
    method.create_weights(quantized, dtype, "meta")
    apply.move_biases(layer, quantized)
    quantized.train(layer.training)
    stored = _stored(layer, config)
    expect_scales(quantized, {key: tuple(tensor.shape) for key, tensor in stored.items()})
    _take(name, quantized, stored, INSTEAD)
    return quantized


def _stored(layer: nn.Module, config: QuantizationConfig) -> dict[str, Tensor]:
    """The tensors of a layer of transformers, by our names."""
    tensors = (*layer._parameters.items(), *layer._buffers.items())
    return {config.rename.get(key, key): tensor for key, tensor in tensors if tensor is not None}


def _take(
    name: str,
    quantized: QuantizedLayer,
    stored: Mapping[str, Tensor],
    remedy: str,
    optional: Collection[str] = (),
) -> None:
    """Give the layer, on meta, the stored tensors for its parameters except biases.

    Raises ValueError for one that is missing, unless it is optional, or has another shape or dtype.
    """
    for key, wanted in list(quantized.named_parameters(recurse=False)):
        tensor = stored.get(key)
        if key in quantized.BIASES:
            continue
        if tensor is None and key in optional:
            del quantized._parameters[key]
        elif (
            tensor is None
            or tensor.shape != wanted.shape
            or not _compatible_dtypes(tensor.dtype, wanted.dtype)
        ):
            here = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(
                f"{name}.{key} is {here}, expected {wanted.dtype} {list(wanted.shape)}: {remedy}"
            )
        else:
            quantized.set(key, tensor.data.to(wanted.dtype))


def _compatible_dtypes(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether the dtypes are equal, or both are of scales: floats of 16 bits or more, or found is a
    power of two.
    """
    scale = _is_float(stored) or stored == torch.float8_e8m0fnu
    return stored == wanted or (scale and _is_float(wanted))


def _is_float(dtype: torch.dtype) -> bool:
    """Whether it is a float of 16 bits or more, and not a dtype of codes."""
    return dtype.is_floating_point and dtype.itemsize > 1
