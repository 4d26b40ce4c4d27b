"""Keys and values of all heads from the latent of multi-head latent attention, in Triton: one
quantized product, whose result is written to the keys and values, and the copy of the rotated keys.

Codes are multiplied as fp16, which represents each exactly, and accumulated in fp32. This runs on
every device; the higher speed of fp8 products is not used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import strided, unknown, unlike, wrong_rank
from atomc.kernels.triton.launch.launch import (
    MAX_DIMS,
    begin,
    inner_sizes,
    num_rows,
    overlap,
    row_layout,
    row_offset,
    row_strides,
    unfit,
)
from atomc.kernels.triton.rows.kv_write import byte_view, code_numbers, codes_of
from atomc.kernels.triton.w4a16.mxfp4 import e2m1_rows, e8m0_values
from atomc.ops.formats import FP8
from atomc.ops.mla import SPLIT_CAT_SCHEMES
from atomc.ops.op import Refusal
from atomc.platform import Platform

# Not measured on any GPU.
BLOCK_N, MOST_M = 64, 64


@triton.jit(do_not_specialize=["rows"])
def _linear_split_cat(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    k_pe_ptr,
    k_ptr,
    v_ptr,
    rows,
    N,
    x_d1,
    x_d2,
    x0,
    x1,
    x2,
    s_d1,
    s_d2,
    s0,
    s1,
    s2,
    s_group,
    weight_row,
    scale_row,
    scale_column,
    d1,
    p0,
    p1,
    p2,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    P: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    SCHEME: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Axis 1 of the grid: tiles of the weight's rows, then tiles of all heads' rotated keys."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tiles = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(1)
    begin(PDL)
    if tile < tiles:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x_at = row_offset(row, x_d1, x_d2, x0, x1, x2)
        s_at = row_offset(row, s_d1, s_d2, s0, s1, s2)
        w_at = n[:, None].to(tl.int64) * weight_row
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            x_there = (row < rows) & (k < K)
            w_there = (n < N)[:, None] & (k < K)
            # A block of K is a block of scales.
            if SCHEME == "mxfp4":
                product = tl.dot(
                    e2m1_rows(x_ptr + x_at, k, x_there),
                    tl.trans(e2m1_rows(weight_ptr + w_at, k, w_there)),
                )
                x_scale = e8m0_values(tl.load(x_scale_ptr + s_at + start // 32, row < rows, 127))
                w_scale = e8m0_values(
                    tl.load(weight_scale_ptr + n * scale_row + start // 32, n < N, 127)
                )
                acc += product * x_scale * w_scale[None, :]
            else:
                x = code_numbers(tl.load(x_ptr + x_at + k, x_there, 0), tl.float16, CODES)
                w = code_numbers(tl.load(weight_ptr + w_at + k, w_there, 0), tl.float16, CODES)
                product = tl.dot(x, tl.trans(w))
                if SCHEME == "fp8_block":
                    x_scale = tl.load(
                        x_scale_ptr + s_at + start // BLOCK_K * s_group, row < rows, 0.0
                    )
                    w_scale = tl.load(
                        weight_scale_ptr + n // 128 * scale_row + start // BLOCK_K * scale_column,
                        n < N,
                        0.0,
                    )
                    product *= x_scale.to(tl.float32) * w_scale.to(tl.float32)[None, :]
                acc += product
        if SCHEME == "fp8":
            x_scale = tl.load(x_scale_ptr + s_at, row < rows, 0.0).to(tl.float32)
            w_scale = tl.load(weight_scale_ptr + n * scale_row, n < N, 0.0).to(tl.float32)
            acc *= x_scale * w_scale[None, :]
        if SCHEME != "mxfp4":
            acc *= 128.0 * 128.0 if CODES == "fnuz" else 256.0 * 256.0
        column = (n % (P + V))[None, :]
        at = row.to(tl.int64) * HEADS + (n // (P + V))[None, :]
        inside = (row < rows) & (n < N)[None, :]
        acc = acc.to(v_ptr.dtype.element_ty)
        tl.store(
            k_ptr + at * (P + R) + column, acc.to(k_ptr.dtype.element_ty), inside & (column < P)
        )
        tl.store(v_ptr + at * V + column - P, acc, inside & (column >= P))
    else:
        # Triton gives a name one type in both branches; these names differ from those above.
        turned = (tile - tiles) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        head = row * HEADS + turned // R
        there = (row < rows) & (turned < HEADS * R)
        rotated = tl.load(
            k_pe_ptr + row_offset(head, d1, HEADS, p0, p1, p2) + turned % R, there, 0.0
        )
        tl.store(
            k_ptr + head.to(tl.int64) * (P + R) + P + turned % R,
            rotated.to(tl.float32).to(k_ptr.dtype.element_ty),
            there,
        )


def refuse_linear_split_cat(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
    *,
    scheme: str,
    **_: object,
) -> Refusal | None:
    return (
        unfit(platform, k_pe=k_pe)
        or unknown(SPLIT_CAT_SCHEMES, scheme=scheme)
        or unlike((torch.uint8,) if scheme == "mxfp4" else FP8, x=x, weight=weight)
        or strided(x=x, weight=weight, weight_scale=weight_scale)
        or wrong_rank(range(1, MAX_DIMS + 1), x=x)
        or wrong_rank(range(3, MAX_DIMS + 1), k_pe=k_pe)
    )


def _scale_rows(x_scale: Tensor) -> tuple[int, ...]:
    """d1, d2, the strides of the rows of scales, and of groups; zero strides if all rows share a
    scale.
    """
    if x_scale.numel() == 1:
        return 1, 1, 0, 0, 0, 0
    return *row_layout(x_scale), x_scale.stride(-1)


@ops.linear_split_cat.kernel("triton", refuses=refuse_linear_split_cat, tuned_for=())
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
    *lead, heads, rotated = k_pe.shape
    outputs = weight.shape[0]
    values = outputs // heads - nope
    k = k_pe.new_empty(
        (*lead, heads, nope + rotated), dtype=torch.promote_types(out_dtype, k_pe.dtype)
    )
    v = k_pe.new_empty((*lead, heads, values), dtype=out_dtype)
    if rows := num_rows(x):
        block_m = max(16, min(MOST_M, triton.next_power_of_2(rows)))
        scale_row = weight_scale.stride(0) if weight_scale.numel() > 1 else 0
        tiles = triton.cdiv(outputs, BLOCK_N) + triton.cdiv(heads * rotated, BLOCK_N)
        _linear_split_cat[(triton.cdiv(rows, block_m), tiles)](
            byte_view(x),
            byte_view(weight),
            x_scale,
            weight_scale,
            k_pe,
            k,
            v,
            rows,
            outputs,
            *row_layout(x),
            *_scale_rows(x_scale),
            weight.stride(0),
            scale_row,
            weight_scale.stride(-1),
            inner_sizes(k_pe)[0],
            *row_strides(k_pe),
            HEADS=heads,
            K=x.shape[-1] * (2 if scheme == "mxfp4" else 1),
            P=nope,
            V=values,
            R=rotated,
            SCHEME=scheme,
            CODES=codes_of(x)["CODES"],
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            BLOCK_K=32 if scheme == "mxfp4" else 128,
            num_warps=4,
            **overlap(x.device),
        )
    return k, v
