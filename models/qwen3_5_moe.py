"""Qwen3.5 with experts, its text model: Qwen3.5 whose MLPs are those of Qwen3-Next."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from atomc.files.json_types import JSONLike
from atomc.models.config import (
    expert_counts,
    flag,
    head_counts,
    head_width,
    integer,
    number,
    only,
    text_config,
)
from atomc.models.decoder import DECODER_SHARD, CausalLM, Layer
from atomc.models.gated_delta_net import DeltaNetLayer, DeltaNetSizes, hybrid_layer_types
from atomc.models.layers import OnePlusRMSNorm
from atomc.models.mtp import MTP, WithMTP
from atomc.models.qwen3_5 import SplitDeltaNet
from atomc.models.qwen3_next import PARTIAL_ROTARY, Attention, MoE
from atomc.models.rotary import Rotary, rope_parameters, rotated_columns

# Delta nets are divided by heads: see atomc.parallel.delta_nets.
SHARD = DECODER_SHARD


@dataclass(frozen=True)
class Config:
    vocab_size: int
    hidden_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    delta_net: DeltaNetSizes
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotated_columns: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, JSONLike]
    attention_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        hf = text_config(hf)
        only(hf, "hidden_act", "silu")
        heads, kv_heads = head_counts(hf)
        experts, chosen = expert_counts(hf)
        head_dim = head_width(hf, 256)
        rope = rope_parameters(hf, PARTIAL_ROTARY)
        return cls(
            vocab_size=integer(hf, "vocab_size"),
            hidden_size=integer(hf, "hidden_size"),
            moe_intermediate_size=integer(hf, "moe_intermediate_size", 512),
            shared_expert_intermediate_size=integer(hf, "shared_expert_intermediate_size", 512),
            num_experts=experts,
            num_experts_per_tok=chosen,
            norm_topk_prob=True,
            num_hidden_layers=integer(hf, "num_hidden_layers"),
            layer_types=hybrid_layer_types(hf),
            delta_net=DeltaNetSizes.from_hf(hf),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rotated_columns=rotated_columns(hf, rope, head_dim),
            max_position_embeddings=integer(hf, "max_position_embeddings", 32768),
            rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
            rope_parameters=rope,
            attention_bias=flag(hf, "attention_bias"),
            tie_word_embeddings=flag(hf, "tie_word_embeddings"),
        )


def layer_of(config: Config, kind: str) -> nn.Module:
    width = config.hidden_size
    mlp = MoE(config)
    if kind == "full_attention":
        return Layer(config, Attention(config), mlp, OnePlusRMSNorm)
    delta_net = SplitDeltaNet(width, config.delta_net, config.rms_norm_eps)
    return DeltaNetLayer(config, delta_net, mlp)


def draft_layer_of(config: Config) -> MTP:
    return MTP(config, layer_of(config, "full_attention"))


class Qwen3_5MoeForCausalLM(CausalLM, WithMTP):
    """draft_layer: with the checkpoint's draft layer."""

    def __init__(self, config: Config, *, draft_layer: bool = False):
        layers = (layer_of(config, kind) for kind in config.layer_types)
        rotary = Rotary(config.rope_parameters, config.rotated_columns)
        super().__init__(config, layers, rotary, norm=OnePlusRMSNorm)
        self.mtp = draft_layer_of(config) if draft_layer else None

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, JSONLike], *, draft_layer: bool = False
    ) -> "Qwen3_5MoeForCausalLM":
        return cls(Config.from_hf(hf), draft_layer=draft_layer)
