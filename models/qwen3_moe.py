"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts (Yang et al. 2025), all or some of them.

T tokens, D model width, N query heads, K key/value heads, H head width, E experts.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.files.json_types import JSONMapping
from atomc.models.config import (
    AttentionConfig,
    expert_fields,
    head_fields,
    integer,
    model_type,
    only,
)
from atomc.models.decoder import CausalLM, Layer
from atomc.models.experts import Experts, MoE
from atomc.models.layers import MLP
from atomc.models.qwen3 import Attention, sliding_window
from atomc.models.rotary import Rotary, rope_parameters


@dataclass(frozen=True, kw_only=True)
class RouterConfig(AttentionConfig):
    """The fields that the router reads."""

    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = False


@dataclass(frozen=True, kw_only=True)
class Config(RouterConfig):
    intermediate_size: int
    moe_intermediate_size: int
    moe_layers: frozenset[int]
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    sliding_window: int | None

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        return cls.read(
            hf,
            **head_fields(hf),
            **expert_fields(hf),
            moe_layers=moe_layers(hf),
            rope_parameters=rope_parameters(hf),
            sliding_window=sliding_window(hf),
        )


def moe_layers(hf: JSONMapping) -> frozenset[int]:
    """The layers with experts: every decoder_sparse_step-th, except mlp_only_layers."""
    step, dense = integer(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"{model_type(hf)}: mlp_only_layers {dense!r:.40} is not a list")
    layers = range(integer(hf, "num_hidden_layers"))
    return frozenset(i for i in layers if i not in dense and (i + 1) % step == 0)


class Router(nn.Module):
    """The experts of each token, and their weights: softmax over all experts, in fp32."""

    def __init__(self, config: RouterConfig):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] in x.dtype."""
        logits_TE = F.linear(x_TD, self.weight)
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
        weights, ids = scores_TE.topk(self.num_experts_per_tok, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(x_TD.dtype)


def _layer(config: Config, index: int) -> Layer:
    width = config.hidden_size
    if index in config.moe_layers:
        experts = Experts(config.num_experts, width, config.moe_intermediate_size)
        mlp: nn.Module = MoE(Router(config), experts)
    else:
        mlp = MLP(width, config.intermediate_size)
    return Layer(config, Attention(config, config.sliding_window or 0), mlp)


class Qwen3MoeForCausalLM(CausalLM):
    config_class = Config

    def __init__(self, config: Config):
        layers = (_layer(config, i) for i in range(config.num_hidden_layers))
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))
