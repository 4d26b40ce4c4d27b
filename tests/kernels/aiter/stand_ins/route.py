"""Routers, HIP: weights fp32 and ids int32, out-parameters of k columns; logits of 16 or 32 bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from stand_ins import stands_for
from stand_ins.memory import check, contiguous_view, fp32

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _scores(logits: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return logits.float().softmax(-1)
    if function == "sigmoid":
        return 1 / (1 + torch.exp(-logits.float()))
    check(function == "sqrtsoftplus", f"unknown score_func: {function}")
    return F.softplus(logits.float()).sqrt()


def _write(
    weights: Tensor,
    ids: Tensor,
    choice: Tensor,
    scores: Tensor,
    renorm: bool,
    factor: float = 1.0,
    stride: int | None = None,
) -> None:
    """The best ones first. `stride`: of the rows of both outputs, if the kernel knows only one."""
    count, k = ids.shape
    check(k <= min(64, choice.shape[1]), f"topk ({k}) exceeds WARP_SIZE or num_experts")
    found = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(1, found)
    if renorm:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    _rows(weights, count, k, stride, torch.float32).copy_(chosen * factor)
    _rows(ids, count, k, stride, torch.int32).copy_(found)


def _rows(out: Tensor, count: int, k: int, stride: int | None, dtype: torch.dtype) -> Tensor:
    check(out.dtype == dtype, f"written as {dtype}, it is {out.dtype}")
    return out.as_strided((count, k), (out.stride(0) if stride is None else stride, 1))


def _logits(gating_output: Tensor, stride: int) -> Tensor:
    check(gating_output.dtype in FLOATS, "unsupported gating_output dtype")
    return gating_output.as_strided(gating_output.shape, (stride, 1))


@stands_for("aiter")
def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    need_renorm: bool,
    num_shared_experts: int = 0,
    shared_expert_scoring_func: str = "",
) -> None:
    """Softmax over all experts, then the choice; the third argument is scratch."""
    check(num_shared_experts == 0, "experts that all tokens share: not played")
    check(token_expert_indices.dtype == torch.int32, "token_expert_indices are int32")
    check(token_expert_indices.shape == topk_indices.shape, "scratch of another shape")
    token_expert_indices.fill_(-1)
    scores = _scores(_logits(gating_output, gating_output.stride(0)), "softmax")
    _write(topk_weights, topk_indices, scores, scores, need_renorm)


@stands_for("aiter")
def topk_gating(
    topk_weights: Tensor,
    topk_indices: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor | None = None,
    need_renorm: bool = True,
    routed_scaling_factor: float = 1.0,
    score_func: str = "sqrtsoftplus",
) -> None:
    """Any score, no groups; the rows of the logits follow each other."""
    scores = _scores(_logits(gating_output, gating_output.shape[1]), score_func)
    choice = scores
    if correction_bias is not None:
        narrow = correction_bias.dtype == torch.bfloat16 and gating_output.dtype != torch.float16
        check(
            narrow or correction_bias.dtype == torch.float32,
            f"correction_bias dtype {correction_bias.dtype} is not supported",
        )
        choice = scores + contiguous_view(correction_bias, scores.shape[1]).float()
    stride = topk_indices.stride(0)
    _write(topk_weights, topk_indices, choice, scores, need_renorm, routed_scaling_factor, stride)


def _of_groups(choice: Tensor, groups: int, kept: int, best_of: int) -> Tensor:
    """The scores, -inf outside the best groups, each known by the sum of its best ones. Scores are
    read 4 or 2 at a time, and a group's last ones are not seen if they do not fill that.
    """
    check(groups in (1, 2, 4, 8), f"Unsupported num_expert_group: {groups}")
    check(1 <= kept <= groups, "topk_grp must be in [1, num_expert_group]")
    experts = choice.shape[1]
    size, at_once = experts // groups, 4 if experts % 4 == 0 else 2 if experts % 2 == 0 else 1
    if groups == 1:
        return choice
    grouped = choice[:, : size * groups].unflatten(1, (groups, size))
    seen = size // at_once * at_once if best_of == 2 else size
    best = grouped[:, :, :seen].sort(-1, descending=True).values[..., :best_of].sum(-1)
    if seen < best_of:
        best = torch.full_like(best, float("-inf"))
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    open_groups = torch.zeros_like(best, dtype=torch.bool).scatter(1, order, True)
    of_expert = torch.arange(experts) // at_once * at_once // size
    return choice.masked_fill(~open_groups[:, of_expert.clamp(max=groups - 1)], float("-inf"))


@stands_for("aiter")
def grouped_topk(
    gating_output: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    is_softmax: bool = True,
    routed_scaling_factor: float = 1.0,
) -> None:
    """A group is worth its best score."""
    check(gating_output.stride(1) == 1, "gating_output last dimension must be contiguous")
    logits = _logits(gating_output, gating_output.stride(0))
    scores = _scores(logits, "softmax" if is_softmax else "sigmoid")
    choice = _of_groups(scores, num_expert_group, topk_group, best_of=1)
    stride = topk_ids.stride(0)
    _write(topk_weights, topk_ids, choice, scores, need_renorm, routed_scaling_factor, stride)


@stands_for("aiter")
def biased_grouped_topk_hip(
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_grp: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Sigmoid; a group is worth its best two biased scores. The bias is read in the dtype of the
    logits, whatever it is in.
    """
    check(gating_output.stride(1) == 1, "gating_output last dimension must be contiguous")
    logits = _logits(gating_output, gating_output.stride(0))
    experts = logits.shape[1]
    bias = contiguous_view(correction_bias.view(logits.dtype), experts).float()
    scores = _scores(logits, "sigmoid")
    choice = _of_groups(scores + bias, num_expert_group, topk_grp, best_of=2)
    stride, k = topk_ids.stride(0), topk_ids.shape[1]
    if (experts, num_expert_group, topk_grp, k) == (256, 8, 4, 8):
        _write_unsorted(topk_weights, topk_ids, choice, scores, need_renorm, routed_scaling_factor)
        return
    _write(topk_weights, topk_ids, choice, scores, need_renorm, routed_scaling_factor, stride)


def _write_unsorted(
    weights: Tensor, ids: Tensor, choice: Tensor, scores: Tensor, renorm: bool, factor: float
) -> None:
    """The kernel of this one size writes the choices by lane, and scales only what it divides."""
    found = choice.sort(dim=-1, descending=True, stable=True).indices[:, :8].sort(-1).values
    chosen = scores.gather(1, found)
    if renorm:
        chosen = chosen / chosen.sum(-1, keepdim=True) * factor
    fp32(weights, "topk_weights").copy_(chosen)
    ids.copy_(found)
