"""Converts linear layers that transformers quantized to QuantizedLinear, with their codes.

Other libraries keep the tensors of the checkpoint in a layer, under the same names: they are
converted like a checkpoint.
"""

import torch
from torch import Tensor, nn

from atomc.quantization import apply
from atomc.quantization.config import QuantizationConfig, parse
from atomc.quantization.linear import LinearMethod, QuantizedLinear

BEFORE_FIRST_CALL = "before its first call, which unpacks what compressed-tensors holds"


def adopt(model: nn.Module) -> nn.Module:
    """Replace the linear layers that transformers quantized by QuantizedLinear, in place, and
    return the model.

    Raises ValueError for a model that is not quantized, an unsupported format, and a layer without
    codes (compressed-tensors converts them to 16 bits in the first call).
    """
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
    config = parse(settings)
    dtype = next((x.dtype for x in model.parameters() if _is_float(x.dtype)), torch.bfloat16)
    ours = {}
    for name, layer in model.named_modules():
        if not hasattr(layer, "in_features") or isinstance(layer, QuantizedLinear):
            continue
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        method = config.get_quant_method(plain, name)
        if method is not None:
            ours[name] = _convert(name, layer, plain, method, config, dtype)
    for name, made in ours.items():
        apply.replace(model, name, made)
    unpacking = getattr(model, "ct_decompress_hook", None)  # of compressed-tensors
    if unpacking is not None:
        unpacking.remove()
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
    stored = {
        config.rename.get(key, key): x
        for key, x in (*layer._parameters.items(), *layer._buffers.items())
    }
    optional = method.format.optional if method.format else frozenset()
    for key, wanted in list(made.named_parameters(recurse=False)):
        found = stored.get(key)
        if key == "bias":
            continue
        if found is None and key in optional:
            del made._parameters[key]
        elif (
            not isinstance(found, Tensor)
            or found.shape != wanted.shape
            or not _compatible_dtypes(found.dtype, wanted.dtype)
        ):
            here = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else "missing"
            raise ValueError(
                f"{name}.{key} is {here}, expected {wanted.dtype} {list(wanted.shape)}: "
                f"adopt the model {BEFORE_FIRST_CALL}"
            )
        else:
            made.set(key, found.data.to(wanted.dtype))
    return made


def _compatible_dtypes(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether the dtypes are equal, or both are floats of 16 bits or more (scales)."""
    return found == wanted or (_is_float(found) and _is_float(wanted))


def _is_float(dtype: torch.dtype) -> bool:
    """Whether it is a float of 16 bits or more, and not a dtype of codes."""
    return dtype.is_floating_point and dtype.itemsize > 1
