"""The experts of DeepSeek-V3 and GLM-4.5, their router, and the shared experts beside them.

T tokens, D model width, E experts, k experts of each token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.models import experts
from atomc.models.config import DecoderConfig
from atomc.models.layers import MLP


@dataclass(frozen=True, kw_only=True)
class GroupedExpertsConfig(DecoderConfig):
    n_routed_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_intermediate_size: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float


class GroupRouter(nn.Module):
    """The experts of each token, and their weights (DeepSeek-V3, equations 12 to 16): sigmoid
    scores in fp32; the bias changes only the choice, which is from the best groups.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: GroupedExpertsConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        bias = torch.zeros(config.n_routed_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        nn.init.normal_(self.weight, std=0.02)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GroupRouter":
        """Move to the model's device; the bias stays in fp32: in bf16 it changes the choice."""
        bias = self.e_score_correction_bias

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            converted = tensor is bias and moved.dtype != tensor.dtype
            return tensor.to(moved.device) if converted else moved

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] f32."""
        config = self.config
        logits_TE = F.linear(x_TD.float(), self.weight.float())
        scores_TE = logits_TE.sigmoid()
        choice_TE = scores_TE + self.e_score_correction_bias
        if config.n_group > 1:
            choice_TE = self._mask_other_groups(choice_TE)
        ids = choice_TE.topk(config.num_experts_per_tok, dim=-1, sorted=False).indices
        weights = scores_TE.gather(-1, ids)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * config.routed_scaling_factor

    def _mask_other_groups(self, choice_TE: Tensor) -> Tensor:
        """The scores, -inf outside the groups whose two best scores have the largest sums."""
        grouped = torch.unflatten(choice_TE, -1, (self.config.n_group, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1)
        return mask_other_groups(choice_TE, best, self.config.topk_group, float("-inf"))


def mask_other_groups(scores_TE: Tensor, best: Tensor, count: int, value: float) -> Tensor:
    """scores_TE with this value outside the `count` groups that are best by `best` [T, groups]."""
    groups = best.topk(count, dim=-1, sorted=False).indices
    is_best = torch.zeros_like(best).scatter(-1, groups, 1)
    grouped = torch.unflatten(scores_TE, -1, (best.shape[-1], -1))
    is_best_TE = is_best.unsqueeze(-1).expand_as(grouped).flatten(-2)
    return scores_TE.masked_fill(~is_best_TE.bool(), value)


# Config -> router, which returns the ids and weights of the experts of each token.
RouterClass = Callable[[GroupedExpertsConfig], nn.Module]


class MoE(experts.MoE):
    """Experts and, beside them, the shared experts of all tokens."""

    def __init__(self, config: GroupedExpertsConfig, router: RouterClass = GroupRouter):
        width, expert_width = config.hidden_size, config.moe_intermediate_size
        super().__init__(
            router(config), experts.Experts(config.n_routed_experts, width, expert_width)
        )
        self.shared_experts = MLP(width, expert_width * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        routed = super().forward(x)
        shared: Tensor = self.shared_experts(x)
        return routed + shared
