"""Qwen3-Next: three layers of Gated DeltaNet to one of gated attention, and experts beside a shared
one (Qwen 2025).

T tokens, D model width, N query heads, K key/value heads, H head width, E experts. In a DeltaNet: K
key heads, N value heads of width V, C columns of what is projected.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models import experts
from atomc.models.config import AttentionConfig, expert_fields
from atomc.models.decoder import CausalLM, GroupedQueryAttention, Layer
from atomc.models.gated_delta_net import (
    DeltaNet,
    DeltaNetLayer,
    DeltaNetSizes,
    HybridConfig,
    Projected,
)
from atomc.models.layers import MLP, OnePlusRMSNorm
from atomc.models.mtp import MTP, WithMTP
from atomc.models.qwen3_moe import Router, RouterConfig, moe_layers
from atomc.models.rotary import Rotary, apply_partial_rope


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(HybridConfig, RouterConfig):
    """The fields that experts beside a shared one read."""

    norm_topk_prob: bool = True
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    @classmethod
    def from_hf(cls, hf: JSONMapping, **computed: object) -> Self:
        return super().from_hf(hf, **expert_fields(hf), **computed)


@dataclass(frozen=True, kw_only=True)
class Config(ExpertsConfig):
    intermediate_size: int
    moe_layers: frozenset[int]

    @classmethod
    def from_hf(cls, hf: JSONMapping, **computed: object) -> Self:
        return super().from_hf(hf, moe_layers=moe_layers(hf), **computed)


class Attention(GroupedQueryAttention):
    """Attention whose result is multiplied by the sigmoid of a gate, a second half of each query
    head (Qiu et al. 2025).
    """

    def __init__(self, config: AttentionConfig):
        super().__init__(config, queries=2)
        self.q_norm = OnePlusRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = OnePlusRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH, gate_TNH = self.q_proj(x_TD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        k_TKH = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TKH = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        q_TNH, k_TKH = apply_partial_rope(self.q_norm(q_TNH), k_TKH, cos, sin)
        out_TNH = ops.attention(q_TNH, k_TKH, v_TKH, self.kv, scale=self.scale)
        out_TD: Tensor = self.o_proj((out_TNH * gate_TNH.sigmoid()).flatten(-2))
        return out_TD


class PackedDeltaNet(DeltaNet):
    """Two projections: of queries, keys, values and gates, and of b and a of each value head."""

    def __init__(self, width: int, sizes: DeltaNetSizes, eps: float):
        super().__init__(width, sizes, eps)
        self.num_k_heads, self.num_v_heads = sizes.num_key_heads, sizes.num_value_heads
        self.in_proj_qkvz = nn.Linear(width, 2 * sizes.keys + 2 * sizes.values, bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * sizes.num_value_heads, bias=False)

    def project(self, x_TD: Tensor) -> Projected:
        return _unpack(self, self.in_proj_qkvz(x_TD), self.in_proj_ba(x_TD))


def _unpack(net: PackedDeltaNet, qkvz_TC: Tensor, ba_TC: Tensor) -> Projected:
    """Both projections, in which the columns of a key head and its value heads are together."""
    groups = net.num_v_heads // net.num_k_heads
    keys, values = net.head_k_dim, groups * net.head_v_dim
    qkvz_TKC = torch.unflatten(qkvz_TC, -1, (net.num_k_heads, 2 * (keys + values)))
    q, k, v, z = torch.split(qkvz_TKC, [keys, keys, values, values], -1)
    ba_TKC = torch.unflatten(ba_TC, -1, (net.num_k_heads, 2 * groups))
    b_TKG, a_TKG = torch.split(ba_TKC, [groups, groups], -1)
    qkv = torch.cat([q.flatten(-2), k.flatten(-2), v.flatten(-2)], -1)
    z_TNV = torch.unflatten(z.flatten(-2), -1, (net.num_v_heads, net.head_v_dim))
    return Projected(qkv, z_TNV, b_TKG.flatten(-2).sigmoid(), a_TKG.flatten(-2))


class MoE(experts.MoE):
    """Experts, and a shared one whose result has a gate."""

    def __init__(self, config: ExpertsConfig):
        width = config.hidden_size
        stacked = experts.Experts(config.num_experts, width, config.moe_intermediate_size)
        super().__init__(Router(config), stacked)
        self.shared_expert = MLP(width, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        routed = super().forward(x)
        shared: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return routed + shared


def _layer(config: Config, kind: str, *, experts: bool) -> nn.Module:
    width, eps = config.hidden_size, config.rms_norm_eps
    mlp = MoE(config) if experts else MLP(width, config.intermediate_size)
    if kind == "full_attention":
        return Layer(config, Attention(config), mlp, OnePlusRMSNorm)
    return DeltaNetLayer(config, PackedDeltaNet(width, config.delta_net, eps), mlp)


def _draft_layers(config: Config, count: int) -> MTP | None:
    """They have experts if any layer of the model has."""
    experts = bool(config.moe_layers)
    layers = [_layer(config, "full_attention", experts=experts) for _ in range(count)]
    return MTP(config, layers) if layers else None


class Qwen3NextForCausalLM(CausalLM, WithMTP):
    """draft_layers: how many of the checkpoint's."""

    config_class = Config

    def __init__(self, config: Config, *, draft_layers: int = 0):
        layers = (
            _layer(config, kind, experts=i in config.moe_layers)
            for i, kind in enumerate(config.layer_types)
        )
        rotary = Rotary(config.rope_parameters, config.rotated_columns)
        super().__init__(config, layers, rotary, norm=OnePlusRMSNorm)
        self.mtp = _draft_layers(config, draft_layers)
