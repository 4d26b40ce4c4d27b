"""Multi-head latent attention in Triton: the quantized product that projects queries to the latent
space, fused with their rotation and the write into the cache.

The product quantizes queries in registers; codes are multiplied as fp16, which represents each
exactly, and accumulated in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import known_equal
from atomc.kernels.checks import (
    first_refusal,
    odd_group,
    strided,
    unknown,
)
from atomc.kernels.triton.latent.mla import (
    empty_queries,
    refuse_mla_rope_kv_write,
    rotate_query,
    write_latents,
)
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_offset,
    rows_of,
)
from atomc.kernels.triton.rows.kv_write import (
    byte_view,
    cache_of,
    code_numbers,
    codes_of,
)
from atomc.kernels.triton.rows.quant import (
    amax_bits,
    amax_scale,
    e2m1_codes,
    fp8_codes,
    lacks_fp8_rounding,
)
from atomc.kernels.triton.rows.rope import (
    head_parts,
    tables_of,
)
from atomc.kernels.triton.w4a16.mxfp4 import e2m1_rows, e2m1_values, e8m0_values
from atomc.ops.formats import FP8, MX_ROUNDINGS
from atomc.ops.mla import BMM_SCHEMES
from atomc.ops.op import Refusal

# Tile of the product: tokens, and columns of the latent. Not measured on any GPU.
BLOCK_M, BLOCK_L = 16, 64


@triton.jit
def _product(
    q_ptr,
    weight_ptr,
    weight_scale_ptr,
    q_at,
    inside,
    head,
    first,
    w_head,
    w_row,
    s_head,
    s_row,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SCHEME: tl.constexpr,
    W_CODES: tl.constexpr,
    Q_BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
):
    """Query rows of one head, quantized, times BLOCK_L rows of the weight from `first` on:
    [BLOCK_M, BLOCK_L] in fp32.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    out = first + tl.arange(0, BLOCK_L)
    w_at = head.to(tl.int64) * w_head + out[:, None].to(tl.int64) * w_row
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        q = tl.load(q_ptr + q_at + p[None, :], inside & (p < P)[None, :], 0.0).to(tl.float32)
        there = (out < L)[:, None] & (p < P)[None, :]
        # A block of columns is a group with one scale.
        if SCHEME == "fp8":
            LARGEST: tl.constexpr = 240.0 if W_CODES == "fnuz" else 448.0
            scale = amax_scale(q, 1, LARGEST)[:, None]
            codes = fp8_codes(q * tl.div_rn(1.0, scale), W_CODES == "fnuz", Q_BY_BITS)
            weight = code_numbers(
                tl.load(weight_ptr + w_at + p[None, :], there, 0), tl.float16, W_CODES
            )
            acc += tl.dot(code_numbers(codes, tl.float16, W_CODES), tl.trans(weight)) * scale
        else:
            amax = amax_bits(q, 1)
            code = tl.maximum(((amax + MX_BIAS) >> 23) - 2, 0)
            code = tl.where(amax >= 0x7F800000, 255, code)[:, None]
            values = e2m1_values(e2m1_codes(q * e8m0_values(tl.maximum(254 - code, 0)))).to(
                tl.float16
            )
            weight = e2m1_rows(weight_ptr + w_at, p[None, :], there)
            s_at = head.to(tl.int64) * s_head + out.to(tl.int64) * s_row + start // 32
            w_scale = e8m0_values(tl.load(weight_scale_ptr + s_at, out < L, 127))
            acc += tl.dot(values, tl.trans(weight)) * e8m0_values(code) * w_scale[None, :]
    if SCHEME == "fp8":
        EXPONENTS: tl.constexpr = 128.0 * 128.0 if W_CODES == "fnuz" else 256.0 * 256.0
        acc *= tl.load(weight_scale_ptr).to(tl.float32) * EXPONENTS
    return acc


@triton.jit(do_not_specialize=["rows"])
def _bmm_rope_kv_write(
    q_nope,
    weight_ptr,
    weight_scale_ptr,
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
    w_head,
    w_row,
    s_head,
    s_row,
    c_sizes,
    p_sizes,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    SCHEME: tl.constexpr,
    W_CODES: tl.constexpr,
    Q_BY_BITS: tl.constexpr,
    MX_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    CODES: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Axis 1 of the grid: the tiles of the latent of each head, of which the first also rotates the
    queries; then one program that writes the cache.
    """
    TILES: tl.constexpr = (L + BLOCK_L - 1) // BLOCK_L
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    part = tl.program_id(1)
    begin(PDL)
    if part < HEADS * TILES:
        head = part // TILES
        first = part % TILES * BLOCK_L
        inside = token < rows
        row = token * HEADS + head
        latent = _product(
            q_nope.ptr,
            weight_ptr,
            weight_scale_ptr,
            row_offset(row, d1, HEADS, q_nope.s0, q_nope.s1, q_nope.s2),
            inside,
            head,
            first,
            w_head,
            w_row,
            s_head,
            s_row,
            L,
            P,
            BLOCK_P,
            BLOCK_M,
            BLOCK_L,
            SCHEME,
            W_CODES,
            Q_BY_BITS,
            MX_BIAS,
        )
        latent = latent.to(q_nope.ptr.dtype.element_ty).to(tl.float32)
        column = first + tl.arange(0, BLOCK_L)[None, :]
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
    *,
    scheme: str,
    group: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
    **_: object,
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


def _product_constants(
    q_nope: Tensor, weight: Tensor, scheme: str, group: int, dtype: torch.dtype, rounding: str
) -> dict[str, int | bool | str]:
    """What `_product` is compiled for."""
    fp8 = scheme == "fp8"
    return dict(
        P=q_nope.shape[-1],
        BLOCK_P=group if fp8 else 32,
        BLOCK_M=BLOCK_M,
        BLOCK_L=BLOCK_L,
        SCHEME=scheme,
        W_CODES=codes_of(weight)["CODES"],
        Q_BY_BITS=fp8 and lacks_fp8_rounding(dtype, weight.device),
        MX_BIAS=MX_ROUNDINGS[rounding],
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
    scale: Tensor | None = None,
    *,
    scheme: str,
    rope_style: str = "neox",
    group: int = 128,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "even",
) -> tuple[Tensor, Tensor]:
    heads, latent = weight.shape[:2]
    out, turned = empty_queries(q_nope, latent, q_pe, cos)
    if rows := num_rows(kv_c):
        _bmm_rope_kv_write[(triton.cdiv(rows, BLOCK_M), heads * triton.cdiv(latent, BLOCK_L) + 1)](
            rows_of(q_nope),
            byte_view(weight),
            weight_scale,
            *map(rows_of, (q_pe, kv_c, k_pe)),
            tables_of(cos, sin, q_pe),
            tables_of(cos, sin, k_pe),
            out,
            cache_of(kv_cache, scale),
            slots,
            rows,
            inner_sizes(q_nope)[0],
            *weight.stride()[:2],
            *((0, 0) if scheme == "fp8" else weight_scale.stride()[:2]),
            *map(inner_sizes, (kv_c, k_pe)),
            HEADS=heads,
            L=latent,
            **_product_constants(q_nope, weight, scheme, group, dtype, rounding),
            OUT=TRITON_DTYPE[turned],
            PARTS=head_parts(q_pe, cos, rope_style),
            **codes_of(kv_cache),
            **overlap(kv_c.device),
        )
    return out, kv_c.new_empty((0,))
