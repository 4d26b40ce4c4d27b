"""Multi-head latent attention (DeepSeek-V2, section 2.1): the ops before and after its attention.

T tokens, H query heads, P width of the part of a key that is not rotated, V width of a value, L
latent width, R rotated width. A row of the cache [blocks, block_size, L + R] is the normalized
latent of a token, followed by its rotated key, which all heads share: attention over it is
paged_attention with one key head, whose values are the first L columns. Values of an fp8 cache are
codes times `scale`, [1] fp32 (None: 1).
"""

from dataclasses import replace

import torch
from torch import Tensor

from atomc.ops.attention import stored_values
from atomc.ops.op import op
from atomc.ops.op_cost import OpCall, Work, bytes_of, product, state_write
from atomc.ops.op_shapes import rows_of_product, written_token
from atomc.ops.op_traits import Kind
from atomc.ops.quant import quant_fp8_group, quant_mxfp4
from atomc.ops.rope import rope
from atomc.ops.scaled_linear import (
    FP8_BLOCK_WEIGHT,
    FP8_WEIGHT,
    MXFP4_WEIGHT,
    linear_mxfp4,
    mxfp4_values,
    scaled_linear_fp8,
    scaled_linear_fp8_block,
)

# By scheme: the weights of linear_split_cat.
_OF_128 = replace(FP8_BLOCK_WEIGHT, scales=lambda _: "one scale per square of 128")
_SPLIT_CAT_WEIGHTS = {"fp8": FP8_WEIGHT, "fp8_block": _OF_128, "mxfp4": MXFP4_WEIGHT}
SPLIT_CAT_SCHEMES = tuple(_SPLIT_CAT_WEIGHTS)
BMM_SCHEMES = ("fp8", "mxfp4")


@op(
    kind=Kind.STATE_WRITE,
    rows=None,
    cost=state_write,
    mutates=("kv_cache",),
    shape=lambda kv_c: written_token(kv_c),
)
def mla_kv_write(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slots: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Write row t of kv_c [..., L], followed by row t of k_pe [..., R] (T rows each), to slot
    slots[t] of the cache; -1 writes nothing (DeepSeek-V2, section 2.1).

    slots [T] i64 and the returned token [0] as in kv_write.
    """
    rows = slots >= 0
    block, offset = slots[rows] // kv_cache.shape[1], slots[rows] % kv_cache.shape[1]
    parts = [
        stored_values(part.reshape(-1, part.shape[-1])[rows], kv_cache, scale)
        for part in (kv_c, k_pe)
    ]
    kv_cache[block, offset] = torch.cat(parts, -1)
    return kv_c.new_empty((0,))


def empty_queries(
    q_nope: Tensor, q_pe: Tensor, cos: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Uninitialized queries: those of q_nope, multiplied by `weight` of each head [H, L, P] if
    there is one, then the rotated ones.
    """
    dtype = torch.promote_types(q_nope.dtype, torch.promote_types(q_pe.dtype, cos.dtype))
    width = q_nope.shape[-1] if weight is None else weight.shape[1]
    return q_nope.new_empty((*q_nope.shape[:-1], width + q_pe.shape[-1]), dtype=dtype)


def _rotated_and_written(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, cos: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return empty_queries(q_nope, q_pe, cos, weight), written_token(kv_c)


@op(
    kind=Kind.ROPE | Kind.STATE_WRITE,
    rows=None,
    cost=state_write,
    mutates=("kv_cache",),
    shape=_rotated_and_written,
)
def mla_rope_kv_write(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None = None,
    rope_style: str = "neox",
) -> tuple[Tensor, Tensor]:
    """q_nope followed by the rotated q_pe, [..., H, P + R], and the token of
    mla_kv_write(kv_c, rope(k_pe)) (DeepSeek-V2, eq. 14 to 17).

    q_nope [..., H, P], or [..., H, L] if it was projected to the latent space; q_pe [..., H, R],
    kv_c [..., L], k_pe [..., 1, R]; cos and sin as in rope.
    """
    token = mla_kv_write.reference(
        kv_c, rope.reference(k_pe, cos, sin, rope_style), kv_cache, slots, scale
    )
    return torch.cat((q_nope, rope.reference(q_pe, cos, sin, rope_style)), -1), token


def _linear_by_head_cost(call: OpCall) -> Work:
    """Reads the rows of `weight`, which may be a part of a parameter."""
    x, weight = call["x"], call["weight"]
    return bytes_of([x, weight, *call.results]), 2 * x.numel * weight.shape[1]


@op(kind=Kind.BMM, rows=None, cost=_linear_by_head_cost)
def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T per head, of tensors with any strides. x [..., T, H, P] and weight [H, L, P] ->
    [..., T, H, L], contiguous.
    """
    return (x.transpose(-2, -3) @ weight.transpose(-1, -2)).transpose(-2, -3).contiguous()


@op(kind=Kind.BMM, rows=None, cost=product, shape=rows_of_product)
def scaled_bmm_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    *,
    out_dtype: torch.dtype,
    group: int = 128,
) -> Tensor:
    """x @ weight.T of the dequantized operands, per head. x [..., H, P] and weight [H, L, P] fp8 ->
    [..., H, L] in out_dtype.

    x_scale       fp32 [..., H, ceil(P / group)], from quant_fp8_group
    weight_scale  fp32 [1]
    """
    by_row = x_scale.to(torch.float32).repeat_interleave(group, -1)[..., : x.shape[-1]]
    return _head_products(x.to(torch.float32) * by_row, weight.to(torch.float32) * weight_scale).to(
        out_dtype
    )


@op(kind=Kind.BMM, rows=None, cost=product, shape=rows_of_product)
def bmm_mxfp4(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, *, out_dtype: torch.dtype
) -> Tensor:
    """x @ weight.T per head, both in MXFP4 (OCP Microscaling v1.0) -> [..., H, L] in out_dtype.

    x [..., H, P/2] and weight [H, L, P/2] uint8, two e2m1 codes per byte; their scales [..., P/32]
    uint8, e8m0.
    """
    return _head_products(mxfp4_values(x, x_scale), mxfp4_values(weight, weight_scale)).to(
        out_dtype
    )


def _head_products(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., H, P] and weight [H, L, P], fp32 -> [..., H, L]."""
    return (x.unsqueeze(-2) @ weight.transpose(-1, -2)).squeeze(-2)


@op(kind=Kind.BMM, rows=None, cost=_linear_by_head_cost, shape=rows_of_product)
def quantized_linear_by_head(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    scheme: str,
    group: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
) -> Tensor:
    """linear_by_head in x.dtype, of x that is quantized. x [..., H, P] -> [..., H, L].

    weight and weight_scale as in scaled_bmm_fp8 (scheme "fp8"; group and dtype of its quantizer) or
    bmm_mxfp4 ("mxfp4"; rounding of its quantizer). Raises ValueError for another scheme.
    """
    if scheme == "fp8":
        codes, scales = quant_fp8_group.reference(x, group, False, dtype)
        return scaled_bmm_fp8.reference(
            codes, weight, scales, weight_scale, out_dtype=x.dtype, group=group
        )
    if scheme == "mxfp4":
        codes, scales = quant_mxfp4.reference(x, rounding)
        return bmm_mxfp4.reference(codes, weight, scales, weight_scale, out_dtype=x.dtype)
    raise ValueError(f"quantized_linear_by_head: scheme {scheme!r} is not one of {BMM_SCHEMES}")


def _product_and_write(call: OpCall) -> Work:
    """The product of queries and weights of each head, and a write to the state."""
    moved, _ = state_write(call)
    return moved, 2 * call["q_nope"].numel * call["weight"].shape[1]


@op(
    kind=Kind.BMM | Kind.ROPE | Kind.STATE_WRITE,
    rows=None,
    cost=_product_and_write,
    mutates=("kv_cache",),
    shape=_rotated_and_written,
)
def bmm_rope_kv_write(
    q_nope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    slots: Tensor,
    scale: Tensor | None = None,
    *,
    scheme: str,
    rope_style: str = "neox",
    group: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
) -> tuple[Tensor, Tensor]:
    """mla_rope_kv_write with queries that are quantized and multiplied by `weight`, which projects
    them to the latent space, in q_nope.dtype (the absorbed W^UK of DeepSeek-V2, section 2.1.2).

    q_nope [..., H, P]; weight, weight_scale, scheme, group, dtype and rounding as in
    quantized_linear_by_head. Other arguments and results as in mla_rope_kv_write.
    """
    latent = quantized_linear_by_head.reference(
        q_nope, weight, weight_scale, scheme=scheme, group=group, dtype=dtype, rounding=rounding
    )
    written = mla_rope_kv_write.reference(
        latent, q_pe, kv_c, k_pe, cos, sin, kv_cache, slots, scale, rope_style
    )
    return written[0], written[1]


def _linear_split_cat_shape(
    x: Tensor, weight: Tensor, k_pe: Tensor, nope: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    *lead, heads, rotated = k_pe.shape
    k = x.new_empty(
        (*lead, heads, nope + rotated), dtype=torch.promote_types(out_dtype, k_pe.dtype)
    )
    return k, x.new_empty((*lead, heads, weight.shape[0] // heads - nope), dtype=out_dtype)


@op(
    kind=Kind.LINEAR,
    rows="x",
    cost=product,
    quantized_weight=_SPLIT_CAT_WEIGHTS,
    shape=_linear_split_cat_shape,
)
def linear_split_cat(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    *,
    nope: int,
    scheme: str,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads from the latent (DeepSeek-V2, eq. 10 and 11): of the P + V
    columns of a head in x @ weight.T, the first P, followed by k_pe, are the key, and the last V
    the value. k_pe [..., H, R] -> [..., H, P + R] and [..., H, V] in out_dtype.

    nope    P
    scheme  "fp8", "fp8_block" or "mxfp4": x, weight [H * (P + V), ...] and their scales as in
            scaled_linear_fp8, scaled_linear_fp8_block or linear_mxfp4; ValueError for another one
    """
    if scheme == "fp8":
        both = scaled_linear_fp8.reference(x, weight, x_scale, weight_scale, out_dtype=out_dtype)
    elif scheme == "fp8_block":
        both = scaled_linear_fp8_block.reference(
            x, weight, x_scale, weight_scale, out_dtype=out_dtype
        )
    elif scheme == "mxfp4":
        both = linear_mxfp4.reference(x, weight, weight_scale, x_scale, out_dtype=out_dtype)
    else:
        raise ValueError(f"linear_split_cat: scheme {scheme!r} is not one of {SPLIT_CAT_SCHEMES}")
    heads = both.view(*k_pe.shape[:-1], weight.shape[0] // k_pe.shape[-2])
    return torch.cat((heads[..., :nope], k_pe), -1), heads[..., nope:].clone(
        memory_format=torch.contiguous_format
    )
