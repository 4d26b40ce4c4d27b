"""Reads weights that torchao quantized, by names of classes and attributes, without importing it.

Int8Tensor                qdata int8 [N, K]; scale [N, 1] or [1, 1]
Float8Tensor              qdata e4m3 [N, K]; scale [N, 1], [1, 1] or [N / 128, K / 128]
Int4Tensor                qdata int8 [N, K / 2], the first code of a byte in the low bits; scale and
                          zero_point [G, N]: values are codes times scale plus zero_point
IntxUnpackedToInt8Tensor  qdata int8 [N, K]; scale and zero_point [N, G]: values are codes minus
                          zero_point, times scale
N outputs, K inputs, G groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atomc.ops.formats import pack_int4
from atomc.quantization.checkpoints import UPGRADED
from atomc.quantization.layer_weights import Tensors
from atomc.quantization.scheme import Fp8, Fp8Block, Int4, Int8, Scheme

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class Weight(NamedTuple):
    """A weight as tensors of a scheme. note: for the log."""

    scheme: Scheme
    tensors: Tensors
    note: str = ""


def is_of_torchao(x: object) -> bool:
    """Whether x is a tensor subclass of torchao."""
    return isinstance(x, Tensor) and type(x).__module__.partition(".")[0] == "torchao"


def read_weight(weight: Tensor) -> Weight:
    """The weight of a linear layer; codes are not copied, unless their packing differs. Raises
    ValueError for a layout that atomc does not have.
    """
    name = type(weight).__name__
    read = READERS.get(name)
    if read is None or weight.dim() != 2:
        raise ValueError(
            f"{name} of torchao {list(weight.shape)} has a layout that atomc does not have, "
            f"expected a matrix in {', '.join(READERS)}"
        )
    try:
        return read(weight)
    except ValueError as error:
        raise ValueError(f"{name} of torchao has {error}") from error


def _int8(weight: Any) -> Weight:
    kind = _activation(weight, "Int8DynamicActivationInt8WeightConfig")
    how = weight.act_quant_kwargs
    if how.mapping_type.name != "SYMMETRIC" or how.reduce_range:
        raise ValueError("activations that are asymmetric or of 7 bits, expected symmetric int8")
    if kind == "PerBlock":
        raise ValueError("activations with scales of blocks, expected a scale per row")
    if weight.zero_point is not None and weight.zero_point.any():
        raise ValueError("zero points, expected symmetric int8")
    scale = _scale(weight)
    tensors = {"weight": weight.qdata.contiguous(), "weight_scale": scale}
    if len(scale) == 1:
        tensors["weight_scale"] = scale.repeat(len(weight.qdata), 1)
    return Weight(Int8(), tensors, _note(kind))


def _float8(weight: Any) -> Weight:
    kind = _activation(weight, "Float8DynamicActivationFloat8WeightConfig")
    how = weight.act_quant_kwargs
    if weight.qdata.dtype not in FP8 or how.float8_dtype not in FP8:
        raise ValueError(f"{weight.qdata.dtype} codes, expected e4m3")
    if how.hp_value_lb is not None or how.hp_value_ub is not None:
        raise ValueError("activations that are clamped before they are quantized")
    codes, block = weight.qdata.contiguous(), list(weight.block_size)
    if kind == "PerBlock":
        sizes = list(how.granularity.block_size)
        if (block, sizes) != ([128, 128], [1, 128]):
            raise ValueError(
                f"scales of blocks {block}, of activations {sizes}, expected [128, 128], [1, 128]"
            )
        scale = weight.scale.to(torch.float32).contiguous()
        return Weight(Fp8Block(), {"weight": codes, "weight_scale": scale})
    scale = _scale(weight)
    if len(scale) == 1:
        return Weight(Fp8(), {"weight": codes, "weight_scale": scale.reshape(1)}, _note(kind))
    return Weight(Fp8("channel"), {"weight": codes, "weight_scale": scale}, _note(kind))


def _int4(weight: Any) -> Weight:
    if weight.activation_dtype != torch.bfloat16 or weight.act_pre_scale is not None:
        raise ValueError("activations that are scaled or quantized, expected 16 bits")
    if weight.zero_point.any():
        raise ValueError("zero points that are floats, expected groups without or with integers")
    scheme = _groups(weight, zeros=False)
    # The codes -8..7 in two's complement become 0..15, which is what each half of a byte is.
    codes = (weight.qdata.contiguous().view(torch.uint8) ^ 0x88).view(torch.int32)
    return Weight(scheme, {"weight": codes, "weight_scale": weight.scale.t().contiguous()})


def _intx(weight: Any) -> Weight:
    if str(weight.target_dtype) != "torch.int4" or weight.activation_quantization is not None:
        how = "16-bit" if weight.activation_quantization is None else "quantized"
        raise ValueError(
            f"{weight.target_dtype} weights with {how} activations, expected torch.int4 with 16-bit"
        )
    zeros = weight.zero_point.to(torch.float32) + 8
    if not torch.equal(zeros, zeros.round().clamp(0, 15)):
        raise ValueError("zero points that are no integers of 4 bits")
    scheme = _groups(weight, zeros=not bool((zeros == 8).all()))
    tensors = {
        "weight": pack_int4(weight.qdata.to(torch.int32) + 8),
        "weight_scale": weight.scale.to(weight.dtype).contiguous(),
    }
    if scheme.zeros:
        tensors["zeros"] = zeros.to(torch.uint8).contiguous()
    return Weight(scheme, tensors)


READERS: dict[str, Callable[[Any], Weight]] = {
    "Int8Tensor": _int8,
    "Float8Tensor": _float8,
    "Int4Tensor": _int4,
    "IntxUnpackedToInt8Tensor": _intx,
}


def _activation(weight: Any, config: str) -> str:
    """What shares a dynamic scale of activations: "PerRow", "PerTensor" or "PerBlock"."""
    if weight.act_quant_kwargs is None:
        raise ValueError(f"8-bit weights with 16-bit activations, expected those of {config}")
    for name in ("act_pre_scale", "act_quant_scale"):
        if getattr(weight, name, None) is not None:
            raise ValueError(f"static scales of activations ({name}), expected dynamic ones")
    granularity = weight.act_quant_kwargs.granularity
    kind = type(granularity).__name__.replace("PerToken", "PerRow")
    if kind not in ("PerRow", "PerTensor", "PerBlock") or getattr(granularity, "dim", -1) != -1:
        raise ValueError(f"activations quantized by {granularity}, expected PerRow()")
    return kind


def _note(kind: str) -> str:
    return UPGRADED if kind == "PerTensor" else ""


def _scale(weight: Any) -> Tensor:
    """The scales of a weight, fp32 [N, 1], or [1, 1]."""
    rows, columns = weight.qdata.shape
    block = list(weight.block_size)
    if block not in ([1, columns], [rows, columns]):
        raise ValueError(f"scales of blocks {block}, expected one per output or one")
    scale: Tensor = weight.scale.to(torch.float32).reshape(-1, 1)
    return scale


def _groups(weight: Any, *, zeros: bool) -> Int4:
    """The scheme with these groups of inputs. Raises ValueError if the op does not have them."""
    rows, group = weight.block_size
    if rows != 1 or group not in Int4.GROUPS:
        raise ValueError(
            f"scales of blocks {[rows, group]}, expected groups of "
            f"{', '.join(map(str, Int4.GROUPS))} inputs"
        )
    scheme = Int4(group, zeros)
    if reason := scheme.refuses(*weight.shape):
        raise ValueError(f"a shape that int4 does not have: {reason}")
    return scheme
