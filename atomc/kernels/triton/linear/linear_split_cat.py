"""Keys and values of all heads from the latent of multi-head latent attention, in Triton: one
quantized product, whose result is written to the keys and values, and the copy of the rotated keys.

Codes are multiplied as fp16, which represents each exactly, and accumulated in fp32. This runs on
every device; the higher speed of fp8 products is not used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import strided, unknown, unlike, wrong_rank
from atomc.kernels.triton.launch.launch import (
    MAX_DIMS,
    Indexed,
    Rows,
    at,
    begin,
    indexed,
    inner_sizes,
    item,
    num_rows,
    overlap,
    rows_of,
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
    x,
    weight,
    x_scale,
    weight_scale,
    k_pe,
    k_ptr,
    v_ptr,
    rows,
    N,
    sizes,
    scale_sizes,
    s_group,
    d1,
    HEADS: constexpr,
    K: constexpr,
    P: constexpr,
    V: constexpr,
    R: constexpr,
    SCHEME: constexpr,
    CODES: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    PDL: constexpr,
):
    """Axis 1 of the grid: tiles of the weight's rows, then tiles of all heads' rotated keys."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    tiles = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(1)
    begin(PDL)
    if tile < tiles:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        x_at = at(x, row, sizes)
        s_at = at(x_scale, row, scale_sizes)
        w_at = weight.ptr + n[:, None].to(tl.int64) * weight.s0
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            x_there = (row < rows) & (k < K)
            w_there = (n < N)[:, None] & (k < K)
            # A block of K is a block of scales.
            if SCHEME == "mxfp4":
                product = tl.dot(
                    e2m1_rows(x_at, k, x_there),
                    tl.trans(e2m1_rows(w_at, k, w_there)),
                )
                of_x = e8m0_values(tl.load(s_at + start // 32, row < rows, 127))
                w_scale_at = weight_scale.ptr + n * weight_scale.s0 + start // 32
                acc += product * of_x * e8m0_values(tl.load(w_scale_at, n < N, 127))[None, :]
            else:
                codes = code_numbers(tl.load(x_at + k, x_there, 0), tl.float16, CODES)
                w = code_numbers(tl.load(w_at + k, w_there, 0), tl.float16, CODES)
                product = tl.dot(codes, tl.trans(w))
                if SCHEME == "fp8_block":
                    of_x = tl.load(s_at + start // BLOCK_K * s_group, row < rows, 0.0)
                    of_w = tl.load(item(weight_scale, n // 128, start // BLOCK_K), n < N, 0.0)
                    product *= of_x.to(tl.float32) * of_w.to(tl.float32)[None, :]
                acc += product
        if SCHEME == "fp8":
            of_x = tl.load(s_at, row < rows, 0.0).to(tl.float32)
            of_w = tl.load(item(weight_scale, n, 0), n < N, 0.0).to(tl.float32)
            acc *= of_x * of_w[None, :]
        if SCHEME != "mxfp4":
            acc *= 128.0 * 128.0 if CODES == "fnuz" else 256.0 * 256.0
        column = (n % (P + V))[None, :]
        out = row.to(tl.int64) * HEADS + (n // (P + V))[None, :]
        inside = (row < rows) & (n < N)[None, :]
        acc = acc.to(v_ptr.dtype.element_ty)
        tl.store(
            k_ptr + out * (P + R) + column, acc.to(k_ptr.dtype.element_ty), inside & (column < P)
        )
        tl.store(v_ptr + out * V + column - P, acc, inside & (column >= P))
    else:
        # Triton gives a name one type in both branches; these names differ from those above.
        turned = (tile - tiles) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        head = row * HEADS + turned // R
        there = (row < rows) & (turned < HEADS * R)
        rotated = tl.load(at(k_pe, head, (d1, HEADS)) + turned % R, there, 0.0)
        tl.store(
            k_ptr + head.to(tl.int64) * (P + R) + P + turned % R,
            rotated.to(tl.float32).to(k_ptr.dtype.element_ty),
            there,
        )


def refuse_linear_split_cat(
    platform: Platform, x: Tensor, weight: Tensor, weight_scale: Tensor, k_pe: Tensor, scheme: str
) -> Refusal | None:
    return (
        unfit(platform, k_pe=k_pe)
        or unknown(SPLIT_CAT_SCHEMES, scheme=scheme)
        or unlike((torch.uint8,) if scheme == "mxfp4" else FP8, x=x, weight=weight)
        or strided(x=x, weight=weight, weight_scale=weight_scale)
        or wrong_rank(range(1, MAX_DIMS + 1), x=x)
        or wrong_rank(range(3, MAX_DIMS + 1), k_pe=k_pe)
    )


@ops.linear_split_cat.kernel("triton", refuses=refuse_linear_split_cat, tuned_for=())
def linear_split_cat(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    k_pe: Tensor,
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
        # Scales that all rows share have strides of zero.
        scales = rows_of(x_scale) if x_scale.numel() > 1 else Rows(x_scale, 0, 0, 0)
        scale_row = weight_scale.stride(0) if weight_scale.numel() > 1 else 0
        tiles = triton.cdiv(outputs, BLOCK_N) + triton.cdiv(heads * rotated, BLOCK_N)
        _linear_split_cat[(triton.cdiv(rows, block_m), tiles)](
            rows_of(byte_view(x)),
            indexed(byte_view(weight)),
            scales,
            Indexed(weight_scale, scale_row, weight_scale.stride(-1)),
            rows_of(k_pe),
            k,
            v,
            rows,
            outputs,
            *map(inner_sizes, (x, x_scale)),
            x_scale.stride(-1),
            inner_sizes(k_pe)[0],
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
