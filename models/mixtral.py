"""Mixtral: Mistral with a mixture of experts in place of each MLP (Jiang et al. 2024).

T tokens, D model width, N query heads, K key/value heads, H head width, E experts.
"""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc.files.json_types import JSONMapping
from atomc.models.config import AttentionConfig, expert_fields, head_fields, integer, only
from atomc.models.decoder import CausalLM, Layer
from atomc.models.experts import Experts, MoE
from atomc.models.llama import Attention
from atomc.models.rotary import Rotary, rope_parameters


@dataclass(frozen=True, kw_only=True)
class Config(AttentionConfig):
    intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    sliding_window: int | None

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        window = None if hf.get("sliding_window") is None else integer(hf, "sliding_window")
        return cls.read(
            hf,
            **head_fields(hf),
            **expert_fields(hf),
            rope_parameters=rope_parameters({"rope_theta": 1e6, **hf}),
            sliding_window=window,
            attention_bias=False,
        )


class Router(nn.Module):
    """The experts of each token, and their weights: softmax over all experts, in fp32."""

    def __init__(self, config: Config):
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] f32, which add up to 1."""
        logits_TE = F.linear(x_TD, self.weight)
        scores_TE = logits_TE.float().softmax(-1)
        weights, ids = scores_TE.topk(self.num_experts_per_tok, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)


def _layer(config: Config) -> Layer:
    experts = Experts(config.num_experts, config.hidden_size, config.intermediate_size)
    attention = Attention(config, config.sliding_window or 0)
    return Layer(config, attention, MoE(Router(config), experts))


class MixtralForCausalLM(CausalLM):
    config_class = Config

    def __init__(self, config: Config):
        layers = (_layer(config) for _ in range(config.num_hidden_layers))
        super().__init__(config, layers, Rotary(config.rope_parameters, config.head_dim))
