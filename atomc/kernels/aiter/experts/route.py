"""Routers by AITER's HIP kernels. Which of its functions runs depends on the score and the groups.

They write fp32 weights and int32 ids, in the order of falling scores but for one kernel.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.library import Function, scattered, unfit
from atomc.kernels.checks import too_wide, unlike
from atomc.kernels.row_views import as_rows
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform

topk_softmax = Function("topk_softmax", "aiter")
topk_gating = Function("topk_gating", "aiter", takes=["correction_bias", "score_func"])
grouped_topk = Function("grouped_topk", "aiter", takes=["is_softmax", "routed_scaling_factor"])
# Not biased_grouped_topk, which takes another kernel for many tokens: one that always renormalizes.
biased_grouped_topk_hip = Function(
    "biased_grouped_topk_hip", "aiter", takes=["routed_scaling_factor"]
)

SCORES = {
    "softmax": "softmax",
    "softmax_of_chosen": "softmax",
    "sigmoid": "sigmoid",
    "sqrt_softplus": "sqrtsoftplus",
}
GROUPS = (2, 4, 8)
# A lane holds one choice.
MOST_CHOICES = 64
# AITER divides by the sum of the weights alone; so little added to it, or as its least value, is
# lost in the rounding of sums that occur.
NEGLIGIBLE = 1e-12
# (experts, groups, topk_groups, k): their kernel does not sort the choices, and scales weights only
# where it divides them.
UNSORTED = (256, 8, 4, 8)


def _function(
    bias: Tensor | None, score: str, groups: int, group_score: str, scale: float
) -> Function | Refusal:
    if groups > 1:
        if bias is not None and (score, group_score) == ("sigmoid", "top2"):
            return biased_grouped_topk_hip
        if bias is None and score in ("softmax", "sigmoid") and group_score == "max":
            return grouped_topk
        biased = "without" if bias is None else "with"
        return Refusal(
            "argument",
            f"AITER has no router of groups by {group_score!r} of {score!r} {biased} bias",
        )
    if score == "softmax_of_chosen" and bias is not None:
        return Refusal("argument", "AITER adds the bias to the softmax, the op to the logits")
    if score.startswith("softmax") and bias is None and scale == 1.0:
        return topk_softmax
    return topk_gating


def _ungrouped(experts: int, groups: int) -> Refusal | None:
    """Why AITER cannot choose among groups of these experts, or None."""
    if groups <= 1:
        return None
    # The kernel reads 4 or 2 scores at a time, and sees whole ones of a group.
    at_once = 4 if experts % 4 == 0 else 2 if experts % 2 == 0 else 1
    if groups not in GROUPS or experts // groups % at_once:
        return Refusal(
            "shape",
            f"{experts} experts in {groups} groups: AITER takes 2, 4 or 8 groups of a multiple of "
            f"{at_once} experts",
        )
    return None


def _unsorted(
    sizes: tuple[int, int, int, int], in_order: bool, renormalize: bool, scale: float
) -> Refusal | None:
    """Why the kernel of these sizes has other results, or None."""
    if sizes != UNSORTED:
        return None
    experts, groups, topk_groups, k = sizes
    choices = f"{k} choices from {topk_groups} of {groups} groups of {experts} experts"
    if in_order:
        return Refusal("argument", f"AITER does not sort {choices}")
    if scale != 1.0 and not renormalize:
        return Refusal("argument", f"AITER does not scale the undivided weights of {choices}")
    return None


def _refuse(
    platform: Platform,
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
    in_order: bool,
) -> Refusal | None:
    function = _function(bias, score, groups, group_score, scale)
    if isinstance(function, Refusal):
        return function
    if renormalize and max(eps, min_sum) > NEGLIGIBLE:
        return Refusal(
            "argument",
            f"AITER divides by the sum of the weights, here eps={eps} and min_sum={min_sum}",
        )
    return (
        unfit(platform, function)
        or unlike(FLOATS, logits=logits)
        or scattered(logits=logits)
        or too_wide(k, MOST_CHOICES, "choices")
        or _ungrouped(logits.shape[-1], groups)
        or _unsorted((logits.shape[-1], groups, topk_groups, k), in_order, renormalize, scale)
    )


@ops.topk_route.kernel("aiter", refuses=_refuse)
def topk_route(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    flat = as_rows(logits)
    weights = flat.new_empty((flat.shape[0], k), dtype=torch.float32)
    ids = flat.new_empty((flat.shape[0], k), dtype=torch.int32)
    # The softmax of the chosen logits is the softmax of all, divided by the sum of the chosen.
    divided = renormalize or score == "softmax_of_chosen"
    function = _function(bias, score, groups, group_score, scale)
    if not flat.shape[0]:
        pass
    elif function is topk_softmax:
        topk_softmax(weights, ids, torch.empty_like(ids), flat, divided)
    elif function is topk_gating:
        bias_fp32 = None if bias is None else bias.to(torch.float32).contiguous()
        topk_gating(weights, ids, flat.contiguous(), bias_fp32, divided, scale, SCORES[score])
    elif bias is None:
        softmax = score == "softmax"
        grouped_topk(flat, weights, ids, groups, topk_groups, divided, softmax, scale)
    else:
        # The kernel reads the bias in the dtype of the logits.
        wide, added = flat.to(torch.float32), bias.to(torch.float32).contiguous()
        biased_grouped_topk_hip(wide, added, weights, ids, groups, topk_groups, divided, scale)
    shape = (*logits.shape[:-1], k)
    return weights.to(dtype).view(shape), ids.view(shape)
