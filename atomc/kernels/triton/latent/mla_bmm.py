"""Multi-head latent attention in Triton: the quantized product that projects queries to the latent
space, fused with their rotation and the write into the cache.

The product quantizes queries in registers; codes are multiplied as fp16, which represents each
exactly, and accumulated in fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import first_refusal, odd_group, strided, unknown
from atomc.kernels.triton.latent.mla import refuse_mla_rope_kv_write, rotate_query, write_latents
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    Indexed,
    at,
    begin,
    indexed,
    inner_sizes,
    item,
    num_rows,
    overlap,
    rows_of,
)
from atomc.kernels.triton.rows.kv_write import byte_view, cache_of, code_numbers, codes_of
from atomc.kernels.triton.rows.quant import (
    amax_bits,
    amax_scale,
    e2m1_codes,
    fp8_codes,
    lacks_fp8_rounding,
)
from atomc.kernels.triton.rows.rope import head_parts, tables_of
from atomc.kernels.triton.w4a16.mxfp4 import e2m1_rows, e2m1_values, e8m0_values
from atomc.ops.formats import FP8, MX_ROUNDINGS
from atomc.ops.mla import BMM_SCHEMES, empty_queries
from atomc.ops.op import Refusal

# Tile of the product: tokens, and columns of the latent. Not measured on any GPU.
BLOCK_M, BLOCK_L = 16, 64
TILE_M, TILE_L = constexpr(BLOCK_M), constexpr(BLOCK_L)


class HeadProduct(NamedTuple):
    """Queries of a head times its weight [columns, depth]: a constant of a kernel.

    group    columns of a query that have one scale
    codes    the kind of fp8 codes; by_bits: the device has no instruction that rounds to it
    mx_bias  of MXFP4, that of its rounding
    """

    scheme: str
    columns: int
    depth: int
    group: int
    codes: str
    by_bits: bool
    mx_bias: int


@triton.jit
def _product(q_at, weight, weight_scale, inside, head, first, PRODUCT: constexpr):
    """Query rows of one head, quantized, times TILE_L rows of the weight from `first` on:
    [TILE_M, TILE_L] in fp32.
    """
    CODES: constexpr = PRODUCT.codes
    acc = tl.zeros([TILE_M, TILE_L], tl.float32)
    out = first + tl.arange(0, TILE_L)
    w_at = item(weight, head.to(tl.int64), out[:, None].to(tl.int64))
    for start in range(0, PRODUCT.depth, PRODUCT.group):
        p = start + tl.arange(0, PRODUCT.group)
        in_depth = (p < PRODUCT.depth)[None, :]
        q = tl.load(q_at + p[None, :], inside & in_depth, 0.0).to(tl.float32)
        there = (out < PRODUCT.columns)[:, None] & in_depth
        # A block of columns is a group with one scale.
        if PRODUCT.scheme == "fp8":
            LARGEST: constexpr = 240.0 if CODES == "fnuz" else 448.0
            scale = amax_scale(q, 1, LARGEST)[:, None]
            codes = fp8_codes(q * tl.div_rn(1.0, scale), CODES == "fnuz", PRODUCT.by_bits)
            w = code_numbers(tl.load(w_at + p[None, :], there, 0), tl.float16, CODES)
            acc += tl.dot(code_numbers(codes, tl.float16, CODES), tl.trans(w)) * scale
        else:
            amax = amax_bits(q, 1)
            code = tl.maximum(((amax + PRODUCT.mx_bias) >> 23) - 2, 0)
            code = tl.where(amax >= 0x7F800000, 255, code)[:, None]
            values = e2m1_values(e2m1_codes(q * e8m0_values(tl.maximum(254 - code, 0)))).to(
                tl.float16
            )
            w = e2m1_rows(w_at, p[None, :], there)
            s_at = item(weight_scale, head.to(tl.int64), out.to(tl.int64)) + start // 32
            w_scale = e8m0_values(tl.load(s_at, out < PRODUCT.columns, 127))
            acc += tl.dot(values, tl.trans(w)) * e8m0_values(code) * w_scale[None, :]
    if PRODUCT.scheme == "fp8":
        EXPONENTS: constexpr = 128.0 * 128.0 if CODES == "fnuz" else 256.0 * 256.0
        acc *= tl.load(weight_scale.ptr).to(tl.float32) * EXPONENTS
    return acc


@triton.jit(do_not_specialize=["rows"])
def _bmm_rope_kv_write(
    q_nope,
    weight,
    weight_scale,
    q_pe,
    kv_c,
    k_pe,
    q_tables,
    k_tables,
    q_out_ptr,
    cache,
    slots_ptr,
    rows,
    d1,
    c_sizes,
    p_sizes,
    HEADS: constexpr,
    PRODUCT: constexpr,
    OUT: constexpr,
    PARTS: constexpr,
    CODES: constexpr,
    BY_BITS: constexpr,
    PDL: constexpr,
):
    """Axis 1 of the grid: the tiles of the latent of each head, of which the first also rotates the
    queries; then one program that writes the cache.
    """
    L: constexpr = PRODUCT.columns
    TILES: constexpr = (L + TILE_L - 1) // TILE_L
    token = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    part = tl.program_id(1)
    begin(PDL)
    if part < HEADS * TILES:
        head = part // TILES
        first = part % TILES * TILE_L
        inside = token < rows
        row = token * HEADS + head
        q_at = at(q_nope, row, (d1, HEADS))
        latent = _product(q_at, weight, weight_scale, inside, head, first, PRODUCT)
        latent = latent.to(q_nope.ptr.dtype.element_ty).to(tl.float32)
        column = first + tl.arange(0, TILE_L)[None, :]
        tl.store(
            q_out_ptr + row.to(tl.int64) * (L + PARTS.columns) + column,
            latent.to(q_out_ptr.dtype.element_ty),
            inside & (column < L),
        )
        if first == 0:
            rotate_query(q_pe, q_tables, q_out_ptr, row, inside, (d1, HEADS), L, OUT, PARTS)
    else:
        write_latents(
            kv_c,
            k_pe,
            k_tables,
            cache,
            slots_ptr,
            token,
            rows,
            c_sizes,
            p_sizes,
            L,
            OUT,
            PARTS,
            CODES,
            BY_BITS,
        )


def refuse_product(
    q_nope: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    scheme: str,
    group: int,
    dtype: torch.dtype,
    rounding: str,
) -> Refusal | None:
    if reason := unknown(BMM_SCHEMES, scheme=scheme) or strided(weight=weight):
        return reason
    if scheme == "fp8":
        if dtype not in FP8 or weight.dtype != dtype:
            return Refusal(
                "dtype",
                f"queries are quantized to {dtype}, the weight is {weight.dtype}: written for "
                "one kind of fp8",
            )
        return odd_group(group, 16)
    if (
        q_nope.shape[-1] % 32
        or rounding not in MX_ROUNDINGS
        or not known_equal(weight_scale.stride(-1), 1)
    ):
        return Refusal(
            "shape",
            f"mxfp4 takes rows of a multiple of 32, here {q_nope.shape[-1]}, rounded as one of "
            f"{tuple(MX_ROUNDINGS)}",
        )
    return None


refuse_bmm_rope_kv_write = first_refusal(refuse_mla_rope_kv_write, refuse_product)


def _product_of(
    q_nope: Tensor, weight: Tensor, scheme: str, group: int, dtype: torch.dtype, rounding: str
) -> HeadProduct:
    fp8 = scheme == "fp8"
    return HeadProduct(
        scheme,
        weight.shape[1],
        q_nope.shape[-1],
        group if fp8 else 32,
        str(codes_of(weight)["CODES"]),
        fp8 and lacks_fp8_rounding(dtype, weight.device),
        MX_ROUNDINGS[rounding],
    )


@ops.bmm_rope_kv_write.kernel(
    "triton", layout="paged", refuses=refuse_bmm_rope_kv_write, tuned_for=()
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
    scale: Tensor | None,
    scheme: str,
    rope_style: str,
    group: int,
    dtype: torch.dtype,
    rounding: str,
) -> tuple[Tensor, Tensor]:
    heads, latent = weight.shape[:2]
    out = empty_queries(q_nope, q_pe, cos, weight)
    if rows := num_rows(kv_c):
        _bmm_rope_kv_write[(triton.cdiv(rows, BLOCK_M), heads * triton.cdiv(latent, BLOCK_L) + 1)](
            rows_of(q_nope),
            indexed(byte_view(weight)),
            Indexed(weight_scale, 0, 0) if scheme == "fp8" else indexed(weight_scale),
            *map(rows_of, (q_pe, kv_c, k_pe)),
            tables_of(cos, sin, q_pe),
            tables_of(cos, sin, k_pe),
            out,
            cache_of(kv_cache, scale),
            slots,
            rows,
            inner_sizes(q_nope)[0],
            *map(inner_sizes, (kv_c, k_pe)),
            HEADS=heads,
            PRODUCT=_product_of(q_nope, weight, scheme, group, dtype, rounding),
            OUT=TRITON_DTYPE[torch.promote_types(q_pe.dtype, cos.dtype)],
            PARTS=head_parts(q_pe, cos, rope_style),
            **codes_of(kv_cache),
            **overlap(kv_c.device),
        )
    return out, kv_c.new_empty((0,))
