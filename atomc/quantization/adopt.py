"""Converts linear layers and experts that transformers or torchao quantized to those of atomc, with
their codes.

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
        return _adopt_torchao(model, weights)
    given = getattr(getattr(model, "config", None), "quantization_config", None)
    if given is None:
        raise ValueError(
            f"{type(model).__name__} is not quantized: pass the scheme to quantize it to"
        )
    settings = given if isinstance(given, dict) else given.to_dict()
    if settings.get("quantization_status") == "decompressed":  # an enum that is a string
        raise ValueError(
            f"the layers of {type(model).__name__} are already unpacked: adopt it "
            f"{BEFORE_FIRST_CALL}"
        )
    if settings.get("dequantize"):
        raise ValueError(
            f"transformers has dequantized the layers of {type(model).__name__}: load the "
            "checkpoint with atomc, or where transformers keeps it quantized"
        )
    config = parse(settings)
    dtype = next((x.dtype for x in model.parameters() if _is_float(x.dtype)), torch.bfloat16)
    ours: dict[str, QuantizedLayer] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLayer):
            continue
        if hasattr(layer, "in_features"):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            method = config.get_quant_method(plain, name)
            if method is not None:
                ours[name] = _convert(name, layer, plain, method, config, dtype)
        elif not isinstance(getattr(layer, "down_proj", None), nn.Module | None):
            of_experts = config.rule_of_experts(type(layer).__name__, name)
            if of_experts is not None:
                ours[name] = _convert_experts(name, layer, of_experts, config, dtype)
    for name, made in ours.items():
        apply.replace(model, name, made)
    unpacking = getattr(model, "ct_decompress_hook", None)  # of compressed-tensors
    if unpacking is not None:
        unpacking.remove()
    apply.process_weights_after_loading(model)
    return model


def _adopt_torchao(model: nn.Module, weights: Mapping[str, Tensor | None]) -> nn.Module:
    """weights: the quantized ones, by the name of their layer."""
    ours: dict[str, QuantizedLinear] = {}
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
        bias = layer.bias
        if bias is not None:
            bias.requires_grad_(False)
        ours[name] = QuantizedLinear(
            layer.in_features, layer.out_features, bias, LinearMethod(scheme)
        )
        ours[name].train(layer.training).replace_parameters(tensors)
        notes |= {note: None} if note else {}
    for name, made in ours.items():
        apply.replace(model, name, made)
    for note in notes:
        log.warning("adopt: %s", note)
    apply.process_weights_after_loading(model)
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
    if bias is not None:
        bias.requires_grad_(False)
    made = QuantizedLinear(plain.in_features, plain.out_features, bias, method)
    method.create_weights(made, dtype, "meta")
    made.train(layer.training)
    optional = method.format.optional if method.format else frozenset()
    _take(name, made, _stored(layer, config), f"adopt the model {BEFORE_FIRST_CALL}", optional)
    return made


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
    made = QuantizedExperts(spec, method)
    method.create_weights(made, dtype, "meta")
    apply.move_biases(layer, made)
    made.train(layer.training)
    stored = _stored(layer, config)
    expect_scales(made, {key: tuple(tensor.shape) for key, tensor in stored.items()})
    _take(name, made, stored, INSTEAD)
    return made


def _stored(layer: nn.Module, config: QuantizationConfig) -> dict[str, Tensor]:
    """The tensors of a layer of transformers, by our names."""
    tensors = (*layer._parameters.items(), *layer._buffers.items())
    return {config.rename.get(key, key): tensor for key, tensor in tensors if tensor is not None}


def _take(
    name: str,
    made: QuantizedLayer,
    stored: Mapping[str, Tensor],
    remedy: str,
    optional: Collection[str] = (),
) -> None:
    """Give the layer, on meta, the stored tensors for its parameters except biases.

    Raises ValueError for one that is missing, unless it is optional, or has another shape or dtype.
    """
    for key, wanted in list(made.named_parameters(recurse=False)):
        found = stored.get(key)
        if key in made.BIASES:
            continue
        if found is None and key in optional:
            del made._parameters[key]
        elif (
            found is None
            or found.shape != wanted.shape
            or not _compatible_dtypes(found.dtype, wanted.dtype)
        ):
            here = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ValueError(
                f"{name}.{key} is {here}, expected {wanted.dtype} {list(wanted.shape)}: {remedy}"
            )
        else:
            made.set(key, found.data.to(wanted.dtype))


def _compatible_dtypes(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether the dtypes are equal, or both are of scales: floats of 16 bits or more, or found is a
    power of two.
    """
    scale = _is_float(found) or found == torch.float8_e8m0fnu
    return found == wanted or (scale and _is_float(wanted))


def _is_float(dtype: torch.dtype) -> bool:
    """Whether it is a float of 16 bits or more, and not a dtype of codes."""
    return dtype.is_floating_point and dtype.itemsize > 1
