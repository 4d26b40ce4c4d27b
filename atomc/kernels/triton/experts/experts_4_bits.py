"""Experts with 4-bit weights in Triton, for any number of tokens, from weights that are held in the
order of fragments.py. Letters as in grouped.py.
"""

from functools import partial
from typing import Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import first_refusal, unlike, unsupported, wrong_result
from atomc.kernels.triton.experts.expert_checks import scattered, unfit, unreadable
from atomc.kernels.triton.experts.expert_sort import expert_blocks, pairs_per_expert
from atomc.kernels.triton.experts.grouped import launch_pairs, pairs_of, store_pairs, weight_rows
from atomc.kernels.triton.experts.weighted_sum import weighted_sum
from atomc.kernels.triton.launch.launch import let_next_start, tile_of, wait_for_last
from atomc.kernels.triton.launch.tile_table import FragmentTile
from atomc.kernels.triton.launch.tiles import EXPERTS_FRAGMENTS
from atomc.kernels.triton.rows.gate import GateConstants
from atomc.kernels.triton.w4a16.fragment_products import add_part, fragment_weight, number_types
from atomc.kernels.triton.w4a16.fragments import (
    E2M1_UNIT,
    STRIP,
    e2m1_fragments,
    fragment_row,
    int4_fragments,
    packed_groups,
    raised_exponents,
    strip_offset,
)
from atomc.kernels.triton.w4a16.unpacking import other_group
from atomc.ops.experts import Gate
from atomc.ops.formats import HALVES
from atomc.ops.op import Refusal


@triton.jit
def _tile(
    pair,
    expert,
    tile,
    x,
    weight,
    bias,
    out_ptr,
    P,
    per_row,
    N: constexpr,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    NUMBER: constexpr,
    GATE: constexpr,
    BLOCK_N: constexpr,
    WARPS: constexpr,
    PDL: constexpr,
):
    """The products of some pairs of an expert with a tile of the rows of its weight. pair: their
    numbers, P where there is none
    """
    ROWS: constexpr = N if GATE is None else 2 * N
    PARTS: constexpr = (K + 127) // 128
    n = tl.arange(0, BLOCK_N)
    row = weight_rows(n, tile, N, BLOCK_N, GATE, True)
    read = weight_rows(fragment_row(n, WARPS), tile, N, BLOCK_N, GATE, True)
    inside, in_rows, in_x = (read < ROWS)[:, None], (row < ROWS)[:, None], (pair < P)[:, None]
    first = expert.to(tl.int64) * ROWS
    x_at = x.ptr + (pair // per_row).to(tl.int64)[:, None] * x.row
    read, of_expert = (first + read)[:, None], (first + row)[:, None]
    words_at = weight.words + read // STRIP * (PARTS * STRIP * 16) + read % STRIP * 16
    words_at += tl.arange(0, 16)[None, :]
    sums = tl.zeros((BLOCK_N, pair.shape[0]), tl.float32)
    for part in range(PARTS):
        words = tl.reshape(tl.load(words_at + part * (STRIP * 16), inside, 0), (BLOCK_N, 4, 4))
        k = tl.arange(0, 128)[None, :]
        there = in_x & (k < K - part * 128) if K % 128 else in_x
        sums = add_part(
            sums,
            tl.load(x_at + part * 128 + k, there, 0.0).to(NUMBER),
            words,
            weight,
            strip_offset(read, part, PARTS) + tl.zeros((1, 4), tl.int32),
            strip_offset(of_expert, part, PARTS),
            inside,
            in_rows,
            GROUP,
            INT4,
            SIXTEEN,
            WARPS,
        )
    let_next_start(PDL)
    out = tl.trans(sums if INT4 else sums * E2M1_UNIT)
    store_pairs(out, bias, out_ptr, expert, pair, P, row, tile, N, GATE, True)


@triton.jit(do_not_specialize=["P", "blocks"])
def _product(
    x,
    weight,
    bias,
    out_ptr,
    routing,
    P,
    blocks,
    per_row,
    E: constexpr,
    N: constexpr,
    K: constexpr,
    GROUP: constexpr,
    INT4: constexpr,
    SIXTEEN: constexpr,
    NUMBER: constexpr,
    GATE: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    TALL: constexpr,
    num_warps: constexpr,
    PDL: constexpr,
):
    """Without an order a block is one pair, and routing.expert has the experts of the pairs."""
    # The last block of an expert may have few pairs: then only a quarter of it is multiplied.
    FEW: constexpr = BLOCK_M // 4 if BLOCK_M >= 64 else BLOCK_M
    ROWS: constexpr = N if GATE is None else 2 * N
    wait_for_last(PDL)
    block, tile = tile_of(blocks, tl.cdiv(ROWS, BLOCK_N), TALL)
    expert = tl.load(routing.expert + block).to(tl.int32)
    # Read before the expert is known, on which all that follows waits.
    pair = pairs_of(routing.order, block, P, BLOCK_M)
    if (expert >= 0) & (expert < E):
        few = pair
        if FEW != BLOCK_M:
            few = tl.load(routing.order + block * BLOCK_M + tl.arange(0, FEW))
        if FEW == BLOCK_M or tl.sum((pair < P).to(tl.int32)) <= FEW:
            _tile(
                few,
                expert,
                tile,
                x,
                weight,
                bias,
                out_ptr,
                P,
                per_row,
                N,
                K,
                GROUP,
                INT4,
                SIXTEEN,
                NUMBER,
                GATE,
                BLOCK_N,
                num_warps,
                PDL,
            )
        else:
            _tile(
                pair,
                expert,
                tile,
                x,
                weight,
                bias,
                out_ptr,
                P,
                per_row,
                N,
                K,
                GROUP,
                INT4,
                SIXTEEN,
                NUMBER,
                GATE,
                BLOCK_N,
                num_warps,
                PDL,
            )


class PairsOfExperts:
    """The pairs of ids [T, k] in blocks of experts. tile: None for that of the table."""

    def __init__(self, ids: Tensor, num_experts: int, tile: FragmentTile | None = None):
        self.pairs, self.num_experts = ids.numel(), num_experts
        self.tile = tile or EXPERTS_FRAGMENTS.choose(
            ids.device, pairs_per_expert(self.pairs, num_experts), self.pairs
        )
        self.routing = expert_blocks(ids, num_experts, self.tile.block)

    def multiply(
        self,
        x: Tensor,
        words: Tensor,
        scale: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        *,
        int4: bool,
        group: int,
        out_dtype: torch.dtype,
        gate: GateConstants | None = None,
    ) -> Tensor:
        """launch_pairs for words of int4 codes with packed scales and zeros, or of e2m1 codes with
        raised exponents, as fragments.py has them.
        """
        return launch_pairs(
            _product,
            x,
            (fragment_weight(words, scale, zeros),),
            bias,
            self.routing,
            self.pairs,
            words.shape[1] * words.shape[3],
            self.tile.launch(),
            out_dtype,
            gate,
            E=self.num_experts,
            K=x.shape[1],
            GROUP=group,
            INT4=int4,
            **number_types(x.dtype if int4 else torch.bfloat16),
        )


class FragmentOperands(Gate):
    """The arguments of these kernels, with weights and scales as they are prepared."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w13: tuple[Tensor]
    w13_scale: tuple[Tensor]
    w2: tuple[Tensor]
    w2_scale: tuple[Tensor]
    b13: Tensor | None
    b2: Tensor | None


def _both_products(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: tuple[Tensor],
    w13_scale: tuple[Tensor],
    w2: tuple[Tensor],
    w2_scale: tuple[Tensor],
    b13: Tensor | None,
    b2: Tensor | None,
    w13_zeros: tuple[Tensor] | None = None,
    w2_zeros: tuple[Tensor] | None = None,
    *,
    int4: bool,
    group: int,
    out_dtype: torch.dtype,
    **gate: Unpack[Gate],
) -> Tensor:
    """The weighted sums of the experts, [T, H]."""
    up = *w13, *w13_scale, w13_zeros[0] if w13_zeros else None, b13
    down = *w2, *w2_scale, w2_zeros[0] if w2_zeros else None, b2
    experts = PairsOfExperts(ids, len(up[0]))
    product = partial(experts.multiply, int4=int4, group=group, out_dtype=out_dtype)
    products = product(product(x, *up, gate=GateConstants(**gate)), *down)
    return weighted_sum(products, ids, weights, experts.num_experts)


def refuse_int4_types(x: Tensor, w13_scale: Tensor, w2_scale: Tensor) -> Refusal | None:
    return unlike(HALVES, x=x) or unlike((x.dtype,), w13_scale=w13_scale, w2_scale=w2_scale)


refuse_moe_experts_w4a16 = first_refusal(
    unfit, refuse_int4_types, other_group, unreadable, scattered
)


@ops.moe_experts_w4a16.kernel(
    "triton",
    refuses=refuse_moe_experts_w4a16,
    prepare={
        "w13": int4_fragments,
        "w13_scale": packed_groups,
        "w13_zeros": packed_groups,
        "w2": int4_fragments,
        "w2_scale": packed_groups,
        "w2_zeros": packed_groups,
    },
    attributes=("group",),
    tuned_for=EXPERTS_FRAGMENTS.archs,
)
def moe_experts_w4a16(
    w13_zeros: tuple[Tensor] | None,
    w2_zeros: tuple[Tensor] | None,
    group: int,
    **operands: Unpack[FragmentOperands],
) -> Tensor:
    zeros = {"w13_zeros": w13_zeros, "w2_zeros": w2_zeros}
    dtype = operands["x"].dtype
    return _both_products(**operands, **zeros, int4=True, group=group, out_dtype=dtype)


def refuse_mxfp4_types(x: Tensor, x_scale: Tensor | None, out_dtype: torch.dtype) -> Refusal | None:
    taken = (torch.bfloat16,)  # fp16 cannot represent all scales
    return (
        unsupported("the kernel for 16-bit rows", x_scale=x_scale)
        or unlike(taken, x=x)
        or wrong_result(taken, out_dtype)
    )


refuse_moe_experts_mxfp4 = first_refusal(unfit, refuse_mxfp4_types, unreadable, scattered)


@ops.moe_experts_mxfp4.kernel(
    "triton",
    refuses=refuse_moe_experts_mxfp4,
    prepare={
        "w13": e2m1_fragments,
        "w13_scale": raised_exponents,
        "w2": e2m1_fragments,
        "w2_scale": raised_exponents,
    },
    tuned_for=EXPERTS_FRAGMENTS.archs,
)
def moe_experts_mxfp4(out_dtype: torch.dtype, **operands: Unpack[FragmentOperands]) -> Tensor:
    return _both_products(**operands, int4=False, group=32, out_dtype=out_dtype)
