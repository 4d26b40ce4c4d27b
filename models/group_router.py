"""The router of DeepSeek-V3, which GLM-4.5 has as well.

T tokens, D model width, E experts, k experts of each token.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.models.layers import keeping_dtype


class GroupRouter(nn.Module):
    """The experts of each token, and their weights (DeepSeek-V3, equations 12 to 16): sigmoid
    scores in fp32; the bias changes only the choice, which is from the best groups.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        *,
        chosen: int,
        groups: int,
        topk_groups: int,
        renormalize: bool,
        scale: float,
    ):
        super().__init__()
        self.chosen, self.renormalize, self.scale = chosen, renormalize, scale
        self.groups, self.topk_groups = groups, topk_groups
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        nn.init.normal_(self.weight, std=0.02)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupRouter":
        """Move to the model's device, but keep the bias in fp32: in bf16 other experts are
        chosen.
        """
        kept = keeping_dtype(fn, self.e_score_correction_bias)
        super()._apply(kept, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] f32."""
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid()
        choice_TE = scores_TE + self.e_score_correction_bias
        if self.groups > 1:
            choice_TE = self._in_best_groups(choice_TE)
        ids = choice_TE.topk(self.chosen, dim=-1).indices
        weights = scores_TE.gather(-1, ids)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.scale

    def _in_best_groups(self, choice_TE: Tensor) -> Tensor:
        """The scores, -inf outside the groups whose two best scores have the largest sums."""
        grouped = torch.unflatten(choice_TE, -1, (self.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1)
        return outside_best_groups(choice_TE, best, self.topk_groups, float("-inf"))


def outside_best_groups(scores_TE: Tensor, best: Tensor, count: int, value: float) -> Tensor:
    """scores_TE with this value outside the `count` groups that are best by `best` [T, groups]."""
    chosen = best.topk(count, dim=-1, sorted=False).indices
    kept = torch.zeros_like(best).scatter(-1, chosen, 1)
    grouped = torch.unflatten(scores_TE, -1, (best.shape[-1], -1))
    kept_TE = kept.unsqueeze(-1).expand_as(grouped).flatten(-2)
    return scores_TE.masked_fill(~kept_TE.bool(), value)
