"""Converts the 4-bit formats of checkpoints to ours.

N outputs, K inputs, G groups; words are int32, code i of a word at bits 4i.

ours                weight [N, K/8]; weight_scale [N, G]; zeros uint8 [N, G]
compressed-tensors  weight_packed [N, K/8]; weight_scale [N, G]; weight_zero_point [N/8, G], packed
                    along N
GPTQ                qweight [K/8, N], packed along K; scales [G, N]; qzeros [G, N/8], zero points
                    minus one; g_idx [K]
AWQ                 qweight [K, N/8], packed along N, the codes of a word in the order 0 2 4 6 1 3 5
                    7; scales [G, N]; qzeros [G, N/8] likewise

NVFP4 has bytes of two e2m1 codes, the first one in the low bits, and e4m3 scales in all layouts:

ours                weight [N, K/2]; weight_scale [N, K/16]; global_scale [N, 1]
compressed-tensors  weight_packed, weight_scale; weight_global_scale [1], the reciprocal
ModelOpt            weight, weight_scale; weight_scale_2 []
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from atomc.ops.formats import pack_int4, unpack_int4
from atomc.quantization.layer_weights import Shapes, Tensors
from atomc.quantization.linear import Format
from atomc.quantization.nvfp4 import Nvfp4
from atomc.quantization.scheme import Int4, Mxfp4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _zeros(scheme: Int4, zeros: Tensor, name: str) -> Tensors:
    """The zero points, if the scheme has them; otherwise all must be 8, else ValueError."""
    if scheme.zeros:
        return {"zeros": zeros.to(torch.uint8).contiguous()}
    if not zeros.eq(8).all():
        raise ValueError(f"{name} has zero points other than 8, but the config is symmetric")
    return {}


# compressed-tensors


def _packed(
    scheme: Int4 | Mxfp4, out_features: int, in_features: int, dtype: torch.dtype
) -> Shapes:
    shapes = scheme.tensors(out_features, in_features, dtype)
    return {"weight_packed": shapes["weight"], "weight_scale": shapes["weight_scale"]}


def _compressed(scheme: Int4, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
    shapes = _packed(scheme, out_features, in_features, dtype)
    shapes["weight_shape"] = ((2,), torch.int64)
    if scheme.zeros:
        groups = in_features // scheme.group
        shapes["weight_zero_point"] = ((-(-out_features // 8), groups), torch.int32)
    return shapes


def _convert_compressed(scheme: Int4, stored: Tensors) -> Tensors:
    packed, scale = stored["weight_packed"], stored["weight_scale"]
    rows, columns = packed.shape[0], packed.shape[1] * 8
    shape = stored["weight_shape"].tolist() if "weight_shape" in stored else [rows, columns]
    if shape != [rows, columns]:
        raise ValueError(f"weight_shape is {shape}, weight_packed has {[rows, columns]}")
    tensors = {"weight": packed, "weight_scale": scale}
    if scheme.zeros:
        tensors["zeros"] = (
            unpack_int4(stored["weight_zero_point"].t()).t()[:rows].to(torch.uint8).contiguous()
        )
    return tensors


PACK_QUANTIZED = Format(
    "pack-quantized", _compressed, _convert_compressed, frozenset({"weight_shape"})
)


def _convert_packed_mxfp4(scheme: Mxfp4, stored: Tensors) -> Tensors:
    return {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"]}


MXFP4_PACK_QUANTIZED = Format("mxfp4-pack-quantized", _packed, _convert_packed_mxfp4)


# NVFP4: the scales of activations, input_global_scale and input_scale, are not used.


class Nvfp4Names(NamedTuple):
    """The names of the codes, of the factor of their scales, and of the scale of activations."""

    weight: str
    factor: str
    of_inputs: str


def _nvfp4(
    names: Nvfp4Names, scheme: Nvfp4, out_features: int, in_features: int, dtype: torch.dtype
) -> Shapes:
    shapes = scheme.tensors(out_features, in_features, dtype)
    return {
        names.weight: shapes["weight"],
        "weight_scale": shapes["weight_scale"],
        names.factor: ((1,), torch.float32),
        names.of_inputs: ((1,), torch.float32),
    }


def _convert_nvfp4(names: Nvfp4Names, divides: bool, scheme: Nvfp4, stored: Tensors) -> Tensors:
    """divides: values are divided by the factor."""
    factor, codes = _one_factor(stored, names.factor), stored[names.weight]
    return {
        "weight": codes,
        "weight_scale": stored["weight_scale"],
        "global_scale": (1.0 / factor if divides else factor).repeat(len(codes), 1),
    }


def _nvfp4_format(name: str, names: Nvfp4Names, *, divides: bool) -> Format:
    shapes, convert = partial(_nvfp4, names), partial(_convert_nvfp4, names, divides)
    return Format(name, shapes, convert, frozenset({names.of_inputs}))


def _one_factor(stored: Tensors, name: str) -> Tensor:
    """The factor of all scales of a weight, [1]. Raises ValueError if it is not positive."""
    factor = stored[name]
    if not (factor.isfinite() & (factor > 0)).all():
        raise ValueError(f"{name} is {factor.item()}, expected a positive number")
    return factor


NVFP4_PACK_QUANTIZED = _nvfp4_format(
    "nvfp4-pack-quantized",
    Nvfp4Names("weight_packed", "weight_global_scale", "input_global_scale"),
    divides=True,
)
MODELOPT_NVFP4 = _nvfp4_format(
    "modelopt NVFP4", Nvfp4Names("weight", "weight_scale_2", "input_scale"), divides=False
)


# GPTQ


def _gptq(scheme: Int4, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
    groups = in_features // scheme.group
    return {
        "qweight": ((in_features // 8, out_features), torch.int32),
        "qzeros": ((groups, out_features // 8), torch.int32),
        "scales": ((groups, out_features), dtype),
        "g_idx": ((in_features,), torch.int32),
    }


def _convert_gptq(less: int, scheme: Int4, stored: Tensors) -> Tensors:
    """less: what is subtracted from stored zero points."""
    codes = unpack_int4(stored["qweight"].t())
    if "g_idx" in stored:
        ordered = (
            torch.arange(codes.shape[1], device=codes.device, dtype=torch.int32) // scheme.group
        )
        groups = stored["g_idx"]
        if not (groups - groups[0]).equal(ordered):  # the first group of a part is another
            raise ValueError(
                "g_idx is not in order: activation order (desc_act) is not supported, quantize "
                "with desc_act=False"
            )
    zeros = (unpack_int4(stored["qzeros"]) + less & 15).t()
    return {
        "weight": pack_int4(codes),
        "weight_scale": stored["scales"].t().contiguous(),
        **_zeros(scheme, zeros, "qzeros"),
    }


GPTQ = Format("gptq", _gptq, partial(_convert_gptq, 1), frozenset({"g_idx"}))
GPTQ_V2 = Format("gptq_v2", _gptq, partial(_convert_gptq, 0), frozenset({"g_idx"}))


# AWQ


def _awq(scheme: Int4, out_features: int, in_features: int, dtype: torch.dtype) -> Shapes:
    groups = in_features // scheme.group
    shapes: Shapes = {
        "qweight": ((in_features, out_features // 8), torch.int32),
        "scales": ((groups, out_features), dtype),
    }
    return shapes | ({"qzeros": ((groups, out_features // 8), torch.int32)} if scheme.zeros else {})


def _unpack_awq(packed: Tensor) -> Tensor:
    """Codes [..., N] in order, of words [..., N/8] in AWQ's order."""
    shifts = torch.tensor(
        [4 * AWQ_ORDER.index(i) for i in range(8)], dtype=torch.int32, device=packed.device
    )
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def _convert_awq(scheme: Int4, stored: Tensors) -> Tensors:
    tensors = {
        "weight": pack_int4(_unpack_awq(stored["qweight"]).t()),
        "weight_scale": stored["scales"].t().contiguous(),
    }
    return tensors | (
        _zeros(scheme, _unpack_awq(stored["qzeros"]).t(), "qzeros") if scheme.zeros else {}
    )


AWQ = Format("awq", _awq, _convert_awq)
