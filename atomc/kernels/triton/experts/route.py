"""Routers in Triton: a warp per token takes the k best of up to 1,024 experts, one after another.

Equal scores are taken in the order of their experts. (torch.topk promises none.)
"""

from typing import Unpack

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.kernels.checks import too_wide, unknown, unlike, wrong_rank, wrong_result
from atomc.kernels.triton.launch.launch import (
    at,
    begin,
    inner_sizes,
    not_nvidia,
    num_rows,
    overlap,
    rows_of,
    scattered,
    unfit,
)
from atomc.kernels.triton.launch.tile_table import Tile
from atomc.kernels.triton.launch.tiles import LINEAR
from atomc.kernels.triton.linear.linear import MAX_ROWS, multiply
from atomc.kernels.triton.rows.activation import softplus
from atomc.ops.by_name import call_by_name
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.ops.route import GROUP_SCORES, SCORES, ExpertChoice
from atomc.platform import Platform

MAX_EXPERTS = 1024
MAX_CHOICES = 32
# On CUDA cores: fp32 logits of fp32 operands are no sums of TF32 products.
FP32_TILE = Tile(1, 2, 1024, 0, 4)


@triton.jit
def _ordered(x):
    """fp32 numbers as int32 in the same order, or such int32 as fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scored(x, SCORE: constexpr):
    """The scores of the logits x of a token, fp32; -inf of padding stays, or becomes 0."""
    if SCORE == "softmax":
        part = tl.exp(x - tl.max(x))
        return tl.div_rn(part, tl.sum(part) + tl.zeros_like(part))
    elif SCORE == "sigmoid":
        return tl.sigmoid(x)
    elif SCORE == "sqrt_softplus":
        return tl.sqrt_rn(softplus(x))
    else:
        return x


@triton.jit
def _masked_scores(scores, real, GROUPS: constexpr, TOPK_GROUPS: constexpr, BY_TWO: constexpr):
    """The scores [groups, experts of one], -inf outside the best groups."""
    scores = tl.where(real, scores, -float("inf"))
    best, place = tl.max(scores, 1, return_indices=True)
    if BY_TWO:
        others = tl.arange(0, scores.shape[1])[None, :] != place[:, None]
        best += tl.max(tl.where(others, scores, -float("inf")), 1)
    group = tl.arange(0, scores.shape[0])
    best = tl.where(group < GROUPS, _ordered(best), -0x80000000)
    ahead = (best[None, :] > best[:, None]) | (
        (best[None, :] == best[:, None]) & (group[None, :] < group[:, None])
    )
    kept = tl.sum(ahead.to(tl.int32), 1) < TOPK_GROUPS
    return tl.where(kept[:, None], scores, -float("inf"))


@triton.jit
def _route(
    logits,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    sizes,
    eps,
    min_sum,
    scale,
    E: constexpr,
    K: constexpr,
    SCORE: constexpr,
    GROUPS: constexpr,
    TOPK_GROUPS: constexpr,
    BY_TWO: constexpr,
    RENORMALIZE: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    token = tl.program_id(0)
    SIZE: constexpr = E // GROUPS
    group = tl.arange(0, triton.next_power_of_2(GROUPS))[:, None]
    member = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    real = (group < GROUPS) & (member < SIZE)
    expert = tl.where(real, group * SIZE + member, E)
    x = tl.load(at(logits, token, sizes) + expert, real, -float("inf")).to(tl.float32)
    scores = _scored(x, SCORE)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, real, 0.0).to(tl.float32)
    if GROUPS > 1:
        choice = _masked_scores(choice, real, GROUPS, TOPK_GROUPS, BY_TWO)

    # Maxima and sums of int32 take one instruction per warp.
    order = tl.where(real, _ordered(choice), -0x80000000)
    bits = scores.to(tl.int32, bitcast=True)
    slot = tl.arange(0, triton.next_power_of_2(K))
    ids = tl.zeros_like(slot)
    experts = tl.zeros_like(slot)
    for i in range(K):
        best = tl.max(order)
        first = tl.min(tl.where(order == best, expert, E))
        taken = expert == first
        ids = tl.where(slot == i, first, ids)
        experts = tl.where(slot == i, tl.sum(tl.where(taken, bits, 0)), experts)
        order = tl.where(taken, -0x80000000, order)

    weights = experts.to(tl.float32, bitcast=True)
    inside = slot < K
    if SCORE == "softmax_of_chosen":
        weights = _scored(tl.where(inside, weights, -float("inf")), "softmax")
    if RENORMALIZE:
        total = tl.sum(tl.where(inside, weights, 0.0))
        weights = tl.div_rn(weights, tl.maximum(total, min_sum) + eps + tl.zeros_like(weights))
    weights *= scale
    place = token.to(tl.int64) * K + slot
    tl.store(weights_ptr + place, weights.to(weights_ptr.dtype.element_ty), inside)
    tl.store(ids_ptr + place, ids, inside)


def refuse_topk_route(
    platform: Platform, logits: Tensor, bias: Tensor | None, **choice: Unpack[ExpertChoice]
) -> Refusal | None:
    return unfit(platform, logits=logits, bias=bias) or _unroutable(logits.shape[-1], **choice)


def _unroutable(experts: int, **choice: Unpack[ExpertChoice]) -> Refusal | None:
    groups = choice["groups"]
    if experts % groups:
        return Refusal("shape", f"{experts} experts are not {groups} groups of one size")
    return (
        too_wide(experts, MAX_EXPERTS, "logits")
        or too_wide(choice["k"], MAX_CHOICES, "choices")
        or unknown(SCORES, score=choice["score"])
        or unknown(GROUP_SCORES, group_score=choice["group_score"])
        or wrong_result(FLOATS, choice["dtype"])
    )


@ops.topk_route.kernel("triton", refuses=refuse_topk_route)
def topk_route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    eps: float,
    min_sum: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    experts, shape = logits.shape[-1], (*logits.shape[:-1], k)
    weights = logits.new_empty(shape, dtype=dtype)
    ids = logits.new_empty(shape, dtype=torch.int32)
    if rows := num_rows(logits):
        _route[(rows,)](
            rows_of(logits),
            bias,
            weights,
            ids,
            inner_sizes(logits),
            float(eps),
            float(min_sum),
            float(scale),
            E=experts,
            K=k,
            SCORE=score,
            GROUPS=groups,
            TOPK_GROUPS=topk_groups,
            BY_TWO=group_score == "top2" and experts > groups,
            RENORMALIZE=renormalize,
            num_warps=1,
            **overlap(logits.device),
        )
    return weights, ids


def refuse_linear_topk_route(
    platform: Platform,
    x: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    bias: Tensor | None,
    logits_dtype: torch.dtype,
    **choice: Unpack[ExpertChoice],
) -> Refusal | None:
    reason = (
        unfit(platform, x=x, weight=weight, linear_bias=linear_bias, bias=bias)
        or not_nvidia(platform)
        or unlike(FLOATS, x=x, weight=weight, linear_bias=linear_bias)
        or wrong_rank((2,), weight=weight)
        or scattered(weight)
    )
    if reason:
        return reason
    if logits_dtype not in (x.dtype, torch.float32):
        return Refusal("dtype", f"x is {x.dtype}, its logits are {logits_dtype}")
    return _unroutable(len(weight), **choice)


def _logits(
    x: Tensor, weight: Tensor, linear_bias: Tensor | None, logits_dtype: torch.dtype
) -> Tensor:
    """x @ weight.T + linear_bias, whose sums are rounded to logits_dtype."""
    # cuBLAS is as fast as we are, but its logits have the dtype of x.
    if num_rows(x) > MAX_ROWS and x.dtype == logits_dtype:
        return F.linear(x, weight, linear_bias)
    tile = FP32_TILE if x.dtype == torch.float32 else None
    return multiply(x, weight, linear_bias, tile, logits_dtype)


# Two kernels, of which the second waits for the first on the device. In one, the program that is
# the last to write its logits would have to find out by an atomic counter, which costs as much.
@ops.linear_topk_route.kernel(
    "triton",
    refuses=refuse_linear_topk_route,
    tuned_for=LINEAR.archs,
)
def linear_topk_route(
    x: Tensor,
    weight: Tensor,
    linear_bias: Tensor | None,
    bias: Tensor | None,
    logits_dtype: torch.dtype,
    **choice: Unpack[ExpertChoice],
) -> tuple[Tensor, Tensor]:
    logits = _logits(x, weight, linear_bias, logits_dtype)
    return call_by_name(topk_route, logits=logits, bias=bias, **choice)
