"""Experts with 4-bit weights for many tokens, in Triton; the codes are unpacked in registers.

Letters as in grouped.py; N rows of a weight, K columns in words of eight codes, groups of columns
that share a scale and, with int4, a zero.
"""

from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, named, unlike, wrong_result
from atomc.kernels.triton.experts.expert_checks import scattered, unfit, unreadable
from atomc.kernels.triton.experts.expert_sort import sort_by_expert
from atomc.kernels.triton.experts.experts_prefill import tile_for
from atomc.kernels.triton.experts.grouped import Codes, launch_pairs, store_pairs, weight_rows
from atomc.kernels.triton.experts.weighted_sum import weighted_sum
from atomc.kernels.triton.launch.launch import let_next_start, tile_of, wait_for_last
from atomc.kernels.triton.launch.tiles import MOE_EXPERTS_4_BITS
from atomc.kernels.triton.rows.gate import GateConstants
from atomc.kernels.triton.w4a16.unpacking import (
    code_words,
    other_group,
    scale_of,
    unpacked,
    zero_of,
)
from atomc.ops.experts import Gate
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.ops.scaled_experts import Int4ExpertOperands, ScaledExpertOperands


@triton.jit(do_not_specialize=["P", "blocks"])
def _product(
    x,
    words_ptr,
    scale_ptr,
    zeros_ptr,
    bias,
    out_ptr,
    routing,
    P,
    blocks,
    per_row,
    N: constexpr,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    GATE: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    BLOCK_K: constexpr,
    TALL: constexpr,
    PDL: constexpr,
):
    """Rows of the weight go down the tile of the tensor cores, which can read them from registers.
    INT4: BLOCK_K columns are in one group.
    """
    ROWS: constexpr = N if GATE is None else 2 * N
    WORDS: constexpr = K // 8
    wait_for_last(PDL)
    block, tile = tile_of(blocks, tl.cdiv(ROWS, BLOCK_N), TALL)
    expert = tl.load(routing.expert + block)
    if expert >= 0:
        pair = tl.load(routing.order + block * BLOCK_M + tl.arange(0, BLOCK_M))
        row = weight_rows(tl.arange(0, BLOCK_N), tile, N, BLOCK_N, GATE, True)
        inside = (row < ROWS)[:, None]
        of_expert = (expert.to(tl.int64) * ROWS + row)[:, None]
        k = tl.arange(0, BLOCK_K)
        word = tl.arange(0, BLOCK_K // 8)[None, :]
        x_at = x.ptr + (pair // per_row).to(tl.int64)[:, None] * x.row + k[None, :]
        TYPE: constexpr = x.ptr.dtype.element_ty
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, K, BLOCK_K):
            word_now = start // 8 + word
            in_x, in_words = (pair < P)[:, None], inside
            if K % BLOCK_K:
                in_x, in_words = in_x & (k < K - start)[None, :], inside & (word_now < WORDS)
            rows = tl.trans(tl.load(x_at + start, in_x, 0.0))
            words = tl.load(words_ptr + of_expert * WORDS + word_now, in_words, 0)
            if INT4:
                # Codes minus zeros are exact in 16 bits, and times their scales they are not.
                at = of_expert * (K // GROUP) + start // GROUP
                scale, zero = scale_of(scale_ptr, at, inside, INT4), zero_of(zeros_ptr, at, inside)
                if zeros_ptr is not None:
                    zero = tl.broadcast_to(zero, words.shape)
                weight = tl.reshape(unpacked(words, 1.0, zero, INT4, TYPE), (BLOCK_N, BLOCK_K))
                sums += tl.dot(weight, rows, input_precision="ieee") * scale
            else:
                at = of_expert * (K // GROUP) + word_now // (GROUP // 8)
                scale = scale_of(scale_ptr, at, in_words, INT4)
                weight = tl.reshape(unpacked(words, scale, 0.0, INT4, TYPE), (BLOCK_N, BLOCK_K))
                sums = tl.dot(weight, rows, sums, input_precision="ieee")
        let_next_start(PDL)
        store_pairs(tl.trans(sums), bias, out_ptr, expert, pair, P, row, tile, N, GATE, True)


def _sum_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
    *,
    group: int,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    """The weighted sums of the experts, [T, H]; of int4 if scales are floats."""
    experts, int4 = len(w13), w13_scale.dtype != torch.uint8
    tile = tile_for(MOE_EXPERTS_4_BITS, x.dtype, ids, experts)
    if int4:
        tile = {**tile, "BLOCK_K": min(tile["BLOCK_K"], group)}
    routing = sort_by_expert(ids, experts, tile["BLOCK_M"])

    def product(x: Tensor, codes: Codes, gate: GateConstants | None = None) -> Tensor:
        *weight, bias = codes
        return launch_pairs(
            _product,
            x,
            weight,
            bias,
            routing,
            ids.numel(),
            codes[0].shape[1],
            tile,
            out_dtype,
            gate,
            K=x.shape[1],
            GROUP=group,
            INT4=int4,
        )

    up = code_words(w13), w13_scale, w13_zeros, b13
    down = code_words(w2), w2_scale, w2_zeros, b2
    products = product(product(x, up, GateConstants(**gate)), down)
    return weighted_sum(products, ids, weights, experts)


refuse_moe_experts_w4a16 = first_refusal(
    unfit,
    named("x", unlike, FLOATS),
    named("w13_scale", unlike, FLOATS),
    named("w2_scale", unlike, FLOATS),
    other_group,
    unreadable,
    scattered,
)


@ops.moe_experts_w4a16.kernel(
    "triton", refuses=refuse_moe_experts_w4a16, tuned_for=MOE_EXPERTS_4_BITS.archs
)
def moe_experts_w4a16(**operands: Unpack[Int4ExpertOperands]) -> Tensor:
    return _sum_of_experts(out_dtype=operands["x"].dtype, **operands)


def refuse_mxfp4_types(x: Tensor, out_dtype: torch.dtype) -> Refusal | None:
    # Not float16, which cannot represent all scales.
    taken = (torch.bfloat16, torch.float32)
    return unlike(taken, x=x) or wrong_result(taken, out_dtype)


refuse_moe_experts_mxfp4 = first_refusal(unfit, refuse_mxfp4_types, unreadable, scattered)


@ops.moe_experts_mxfp4.kernel(
    "triton", refuses=refuse_moe_experts_mxfp4, tuned_for=MOE_EXPERTS_4_BITS.archs
)
def moe_experts_mxfp4(out_dtype: torch.dtype, **operands: Unpack[ScaledExpertOperands]) -> Tensor:
    return _sum_of_experts(group=32, out_dtype=out_dtype, **operands)
