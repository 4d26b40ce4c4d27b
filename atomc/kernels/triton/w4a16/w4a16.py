"""Linear layers with 4-bit weights in Triton; the codes are unpacked in registers.

M rows of x, N rows of the weight, K columns, G groups of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, named, no_fp8_products, unlike, wrong_result
from atomc.kernels.triton.launch.launch import (
    TRITON_DTYPE,
    int64_view,
    let_next_start,
    num_rows,
    overlap,
    wait_for_last,
)
from atomc.kernels.triton.launch.tile_table import Launch, TileTable
from atomc.kernels.triton.launch.tiles import LINEAR_MXFP4, LINEAR_NVFP4, LINEAR_W4A16
from atomc.kernels.triton.w4a16.mxfp4 import e8m0_values
from atomc.kernels.triton.w4a16.unpacking import (
    code_words,
    e2m1_on_top,
    int4_of,
    other_group,
    scale_of,
    unfit,
    unpacked,
    zero_of,
)
from atomc.ops.formats import FLOATS, HALVES, NVFP4_GROUP
from atomc.ops.op import Refusal
from atomc.platform import Platform


@triton.jit
def one_of_four(values, NUMBER: constexpr, SIXTEEN: constexpr):
    """Value NUMBER of the four 16-bit values in each int64, in fp32."""
    half = (values >> NUMBER // 2 * 32).to(tl.int32)
    if tl.bfloat16 == SIXTEEN:
        bits = half & -0x10000 if NUMBER % 2 else half << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return (half >> NUMBER % 2 * 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _row(
    x_ptr,
    x_scale_ptr,
    words_ptr,
    scale_ptr,
    zeros_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    N,
    x_row,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    CODED: constexpr,
    SIXTEEN: constexpr,
    BLOCK_N: constexpr,
    BLOCK_W: constexpr,
    PDL: constexpr,
):
    """One row of x per program, computed in fp32.

    SIXTEEN  the type of a 16-bit x, which is read four values at a time, or None
    """
    WORDS: constexpr = K // 8
    GROUPS: constexpr = K // GROUP
    m = tl.program_id(1).to(tl.int64)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[:, None]
    row = n.to(tl.int64)
    let_next_start(PDL)
    wait_for_last(PDL)
    sums = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
    for start in tl.static_range(0, WORDS, BLOCK_W):
        word = start + tl.arange(0, BLOCK_W)[None, :]
        there = word < WORDS
        inside = (n < N) & there
        # A thread reads one word at a time, and its values of x. By default it would read several
        # adjacent words, and x would be exchanged through shared memory.
        words = tl.load(
            words_ptr + tl.multiple_of(row * WORDS + word, (1, 1)), inside, 0, cache_modifier=".cg"
        )
        # Claims that scales of neighbours are contiguous, so that threads go along rows here, too.
        group = tl.max_contiguous(
            tl.multiple_of(row * GROUPS + word // (GROUP // 8), (1, 1)), (1, BLOCK_W)
        )
        scale = scale_of(scale_ptr, group, inside, INT4)
        zero = zero_of(zeros_ptr, group, inside)
        if CODED:
            codes = tl.load(x_ptr + tl.multiple_of(m * WORDS + word, (1, 1)), there, 0)
            scale *= e8m0_values(tl.load(x_scale_ptr + m * GROUPS + word // (GROUP // 8), there, 0))
        elif SIXTEEN is not None:
            low = tl.load(x_ptr + (m * WORDS + word) * 2, there, 0)
            high = tl.load(x_ptr + (m * WORDS + word) * 2 + 1, there, 0)
        part = tl.zeros((BLOCK_N, BLOCK_W), tl.float32)
        for i in tl.static_range(8):
            if CODED:
                x = e2m1_on_top(codes << (28 - 4 * i))
            elif SIXTEEN is not None:
                x = one_of_four(low if i < 4 else high, i % 4, SIXTEEN)
            else:
                x = tl.load(x_ptr + (m * WORDS + word) * 8 + i, there, 0.0).to(tl.float32)
            if INT4:
                part += int4_of(words, i, zero) * (x * (4.0 if i % 2 else 64.0))
            else:
                part += e2m1_on_top(words << (28 - 4 * i)) * x
        sums += part * scale
    out = tl.sum(sums, 1)[:, None]
    if x_scale_ptr is not None and not CODED:
        out *= tl.load(x_scale_ptr + m * x_row)
    if global_ptr is not None:
        out *= tl.load(global_ptr + n, n < N, 0.0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, out.to(out_ptr.dtype.element_ty), n < N)


@triton.jit(do_not_specialize=["M"])
def _rows(
    x_ptr,
    x_scale_ptr,
    words_ptr,
    scale_ptr,
    zeros_ptr,
    global_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    x_row,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    CODED: constexpr,
    NUMBER: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    PARTS: constexpr,
    PDL: constexpr,
):
    """Several rows of x per program, on tensor cores, with operands of type NUMBER."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[None, :, None]
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :, None]
    # K is split into PARTS, each computed by its own warps.
    LENGTH: constexpr = (K + PARTS * BLOCK_K - 1) // (PARTS * BLOCK_K) * BLOCK_K
    begin = tl.arange(0, PARTS)[:, None, None] * LENGTH
    word = begin // 8 + tl.arange(0, BLOCK_K // 8)[None, None, :]
    k = begin + tl.arange(0, BLOCK_K)[None, None, :]
    # The MMA instruction is 16 rows by 8 columns.
    SWAP: constexpr = BLOCK_M < 16
    wait_for_last(PDL)
    sums = tl.zeros((PARTS, BLOCK_N if SWAP else BLOCK_M, BLOCK_M if SWAP else BLOCK_N), tl.float32)
    for start in range(0, LENGTH, BLOCK_K):
        word_now = word + start // 8
        group = word_now // (GROUP // 8)
        there = word_now < K // 8
        inside = (n < N) & there
        words = tl.load(
            words_ptr + n.to(tl.int64) * (K // 8) + word_now, inside, 0, cache_modifier=".cg"
        )
        # Claims that scales of neighbours are contiguous, but reads one at a time: threads go along
        # rows, as for words.
        group_at = tl.multiple_of(n.to(tl.int64) * (K // GROUP) + group, (1, 1, 1))
        group_at = tl.max_contiguous(group_at, (1, 1, BLOCK_K // 8))
        scale, zero = (
            scale_of(scale_ptr, group_at, inside, INT4),
            zero_of(zeros_ptr, group_at, inside),
        )
        weight = tl.reshape(unpacked(words, scale, zero, INT4, NUMBER), (PARTS, BLOCK_N, BLOCK_K))
        if CODED:
            codes = tl.load(x_ptr + m.to(tl.int64) * (K // 8) + word_now, (m < M) & there, 0)
            group_at = tl.multiple_of(m.to(tl.int64) * (K // GROUP) + group, (1, 1, 1))
            group_at = tl.max_contiguous(group_at, (1, 1, BLOCK_K // 8))
            of_x = e8m0_values(tl.load(x_scale_ptr + group_at, (m < M) & there, 0))
            x = tl.reshape(unpacked(codes, of_x, 0.0, False, NUMBER), (PARTS, BLOCK_M, BLOCK_K))
        else:
            x = tl.load(x_ptr + m.to(tl.int64) * K + start + k, (m < M) & (k < K - start), 0.0).to(
                NUMBER
            )
        if SWAP:
            sums = tl.dot(weight, tl.permute(x, (0, 2, 1)), sums, input_precision="ieee")
        else:
            sums = tl.dot(x, tl.permute(weight, (0, 2, 1)), sums, input_precision="ieee")
    let_next_start(PDL)
    out = tl.sum(sums, 0)
    if SWAP:
        out = tl.trans(out)
    down = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    across = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if x_scale_ptr is not None and not CODED:
        out *= tl.load(x_scale_ptr + down * x_row, down < M, 0.0)
    if global_ptr is not None:
        out *= tl.load(global_ptr + across, across < N, 0.0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + across, across < N, 0.0).to(tl.float32)
    tl.store(
        out_ptr + down.to(tl.int64) * N + across,
        out.to(out_ptr.dtype.element_ty),
        (down < M) & (across < N),
    )


# On CUDA cores; operands are twice as large.
FP32_TILE = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, PARTS=4, num_warps=4, num_stages=2)


def tile_for(table: TileTable[Launch], x: Tensor, k: int) -> Launch:
    """The tile for the rows of x, of k columns. A tile without BLOCK_M takes one row per program,
    another one gives each of the parts of k a warp.
    """
    rows = num_rows(x)
    tile = FP32_TILE if x.dtype == torch.float32 and rows > 1 else table.choose(x.device, rows)
    if "BLOCK_W" not in tile:
        return tile
    return {**tile, "BLOCK_W": min(tile["BLOCK_W"], triton.next_power_of_2(k) // 8)}


def multiply(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    group: int,
    out_dtype: torch.dtype,
    tile: Launch,
    global_scale: Tensor | None = None,
) -> Tensor:
    """The op, with the given tile. words int32 [N, K/8]; of int4 if their scales are floats, of
    NVFP4 if they are bits of e4m3 in int8, which have a global scale per row.
    """
    n, k = words.shape[0], words.shape[1] * 8
    out = x.new_empty((*x.shape[:-1], n), dtype=out_dtype)
    if rows := num_rows(out):
        coded = x.dtype == torch.uint8
        by_row = (code_words(x) if coded else x).reshape(rows, -1)
        shared: dict[str, object] = dict(
            x_scale_ptr=x_scale,
            words_ptr=words,
            scale_ptr=scale,
            zeros_ptr=zeros,
            global_ptr=global_scale,
            bias_ptr=bias,
            out_ptr=out,
            N=n,
            x_row=int(x_scale is not None and x_scale.numel() > 1),
            K=k,
            GROUP=group,
            INT4=scale.is_floating_point(),
            CODED=coded,
            **tile,
            **overlap(x.device),
        )
        across = triton.cdiv(n, tile["BLOCK_N"])
        if "BLOCK_M" in tile:
            grid = across, triton.cdiv(rows, tile["BLOCK_M"])
            _rows[grid](by_row, M=rows, NUMBER=_number(x), **shared)
        else:
            sixteen = TRITON_DTYPE[x.dtype] if x.dtype in HALVES else None
            read = by_row if sixteen is None else int64_view(by_row)
            _row[across, rows](read, SIXTEEN=sixteen, **shared)
    return out


def _number(x: Tensor) -> tl.dtype:
    """The type of the operands: that of x; for codes bf16, which holds e4m3, and e2m1 times a power
    of two.
    """
    # The range of fp16 is too small. The interpreter does not multiply bf16, and uses fp32.
    if x.dtype in TRITON_DTYPE:
        return TRITON_DTYPE[x.dtype]
    return tl.bfloat16 if x.device.type == "cuda" else tl.float32


@ops.linear_w4a16.kernel(
    "triton",
    refuses=first_refusal(
        unfit, named("x", unlike, FLOATS), named("weight_scale", unlike, FLOATS), other_group
    ),
    tuned_for=LINEAR_W4A16.archs,
)
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group: int,
) -> Tensor:
    tile = tile_for(LINEAR_W4A16, x, weight.shape[1] * 8)
    return multiply(x, weight, weight_scale, zeros, None, bias, group, x.dtype, tile)


def refuse_mxfp4_types(platform: Platform, x: Tensor, out_dtype: torch.dtype) -> Refusal | None:
    return (
        # Not float16, which cannot represent all scales. uint8: packed e2m1.
        unlike((torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8), x=x)
        or wrong_result(FLOATS, out_dtype)
        or no_fp8_products(platform, x.dtype)
    )


@ops.linear_mxfp4.kernel(
    "triton", refuses=first_refusal(unfit, refuse_mxfp4_types), tuned_for=LINEAR_MXFP4.archs
)
def linear_mxfp4(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    tile = tile_for(LINEAR_MXFP4, x, weight.shape[1] * 2)
    return multiply(x, code_words(weight), weight_scale, None, x_scale, bias, 32, out_dtype, tile)


@ops.linear_nvfp4.kernel(
    "triton",
    refuses=first_refusal(unfit, named("x", unlike, FLOATS)),
    tuned_for=LINEAR_NVFP4.archs,
)
def linear_nvfp4(
    x: Tensor, weight: Tensor, weight_scale: Tensor, global_scale: Tensor, bias: Tensor | None
) -> Tensor:
    tile = tile_for(LINEAR_NVFP4, x, weight.shape[1] * 2)
    words, scale = code_words(weight), weight_scale.view(torch.int8)
    return multiply(
        x, words, scale, None, None, bias, NVFP4_GROUP, x.dtype, tile, global_scale.contiguous()
    )
