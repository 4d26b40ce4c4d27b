"""Forms of a quantized kv_b_proj, the weight that computes keys and values of latent attention
(atomc.ops.mla_attention). They depend on parameters alone: kernels prepare them once.

H heads, P and V what is not rotated of a key and a value, L width of the latent. The parameters are
those of the linear op of a scheme (atomc.ops.scaled_linear), N = H * (P + V) rows of L columns.
"""

import torch
from torch import Tensor

from atomc.ops.formats import AMAX_FLOOR
from atomc.ops.mla import BMM_SCHEMES
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work
from atomc.ops.op_traits import Kind
from atomc.ops.quant import quant_mxfp4, rounded_fp8
from atomc.ops.scaled_linear import fp8_block_values, int4_weight, mxfp4_values

# Scheme -> columns per element of the stored weight.
STORED = {"fp8": 1, "fp8_block": 1, "int8": 1, "int4": 8, "mxfp4": 2}


def _once(call: OpCall) -> Work:
    """No work of a step."""
    return 0.0, 0.0


def _values(
    weight: Tensor, weight_scale: Tensor, zeros: Tensor | None, scheme: str, group: int
) -> Tensor:
    """The dequantized weight, fp32 [N, L]. Raises ValueError for another scheme."""
    if scheme in ("fp8", "int8"):
        values: Tensor = weight.to(torch.float32) * weight_scale
        return values
    if scheme == "fp8_block":
        return fp8_block_values(weight, weight_scale, group)
    if scheme == "int4":
        return int4_weight(weight, weight_scale, zeros, group)
    if scheme == "mxfp4":
        return mxfp4_values(weight, weight_scale)
    raise ValueError(f"kv_b_proj: scheme {scheme!r} is not one of {tuple(STORED)}")


def _weight_shape(
    weight: Tensor, weight_scale: Tensor, scheme: str, dtype: torch.dtype | None
) -> Tensor:
    shape = weight.shape[0], weight.shape[1] * STORED[scheme]
    return weight.new_empty(shape, dtype=dtype or weight_scale.dtype)


@op(kind=Kind.WEIGHT, rows=None, cost=_once, shape=_weight_shape)
def kv_b_weight(
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None = None,
    *,
    scheme: str,
    activations: str = "",
    group: int = 128,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The dequantized kv_b_proj [H * (P + V), L].

    scheme       "fp8" or "int8" (weight_scale [1] or [N, 1]), "fp8_block", "int4" or "mxfp4"
    activations  what the model multiplies by it: "fp8", "int8", "mxfp4", "" for rows that are not
                 quantized. The result does not depend on it
    group        inputs with one scale, of "fp8_block" and "int4"
    dtype        of the result; None: that of the scales
    Raises ValueError for another scheme.
    """
    return _values(weight, weight_scale, zeros, scheme, group).to(dtype or weight_scale.dtype)


def _half_shape(
    weight: Tensor, scheme: str, heads: int, nope: int, part: str, product: str, codes: torch.dtype
) -> tuple[Tensor, Tensor]:
    latent = weight.shape[1] * STORED[scheme]
    values = weight.shape[0] // heads - nope
    rows, columns = (latent, nope) if part == "keys" else (values, latent)
    if product == "mxfp4":
        return (
            weight.new_empty((heads, rows, columns // 2), dtype=torch.uint8),
            weight.new_empty((heads, rows, columns // 32), dtype=torch.uint8),
        )
    return (
        weight.new_empty((heads, rows, columns), dtype=codes),
        weight.new_empty(1, dtype=torch.float32),
    )


@op(kind=Kind.WEIGHT, rows=None, cost=_once, shape=_half_shape)
def kv_b_half(
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None = None,
    *,
    scheme: str,
    group: int,
    heads: int,
    nope: int,
    part: str,
    product: str,
    codes: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The rows of kv_b_proj that compute keys or values, quantized again, as weights of a product
    per head (atomc.ops.mla). For keys along P columns, transposed: it maps queries to the latent
    space; for values along L columns: it maps results of attention from there.

    part     "keys", H matrices [L, P], or "values", [V, L]
    product  "fp8": codes of dtype `codes`, and one scale, [1] fp32, as scaled_bmm_fp8 takes it;
             "mxfp4": uint8, two codes per byte, and a scale for 32 columns, as bmm_mxfp4 does
    scheme, group  as in kv_b_weight
    nope           P. For "mxfp4" the columns are a multiple of 32
    Raises ValueError for another scheme, part or product.
    """
    if product not in BMM_SCHEMES:
        raise ValueError(f"kv_b_half: product {product!r} is not one of {BMM_SCHEMES}")
    if part not in ("keys", "values"):
        raise ValueError(f"kv_b_half: part {part!r} is not one of ('keys', 'values')")
    values = _values(weight, weight_scale, zeros, scheme, group)
    of_head = values.view(heads, weight.shape[0] // heads, values.shape[1])
    half = (of_head[:, :nope].mT if part == "keys" else of_head[:, nope:]).contiguous()
    if product == "mxfp4":
        return quant_mxfp4.reference(half)
    scale = (half.abs().max().clamp(min=AMAX_FLOOR) / torch.finfo(codes).max).reshape(1)
    return rounded_fp8(half * (1.0 / scale), codes), scale
