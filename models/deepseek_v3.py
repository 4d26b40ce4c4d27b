"""DeepSeek-V2, DeepSeek-V3 (also R1, Kimi K2) and GLM-4.7-Flash: multi-head latent attention, and
experts beside shared ones.

T tokens, D model width, N heads, H width of queries and keys, of which the last R columns are
rotated, V width of values, L width of the latent, E experts.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONLike, JSONMapping
from atomc.models.config import (
    DecoderConfig,
    count,
    expert_counts,
    expert_groups,
    head_counts,
    integer,
    layer_types,
    model_type,
    number,
    only,
)
from atomc.models.decoder import DECODER_SHARD, Layer
from atomc.models.grouped_experts import GroupedExpertsConfig, GroupRouter, MoE, mask_other_groups
from atomc.models.layers import MLP, RMSNorm
from atomc.models.mtp import DraftLayer, WithNumberedDraftLayers
from atomc.models.rotary import (
    Rotary,
    apply_interleaved_rope,
    apply_rope,
    rope_parameters,
    yarn_mscale,
)

# Of the norms of the latents, whatever rms_norm_eps is.
LATENT_EPS = 1e-6
# Values of topk_method -> scores of its router.
ROUTERS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


@dataclass(frozen=True, kw_only=True)
class Config(GroupedExpertsConfig):
    intermediate_size: int
    topk_method: str
    norm_topk_prob: bool = False
    mlp_layer_types: tuple[str, ...]
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        only(hf, "hidden_act", "silu")
        only(hf, "mlp_bias", False)
        only(hf, "moe_layer_freq", 1)
        only(hf, "topk_method", *ROUTERS)
        method = str(hf["topk_method"])
        only(hf, "scoring_func", ROUTERS[method])
        if ROUTERS[method] == "softmax":
            only(hf, "norm_topk_prob", False)
        heads, kv_heads = head_counts(hf)
        if kv_heads != heads:
            raise ValueError(
                f"{model_type(hf)}: num_key_value_heads {kv_heads} is not supported, only that of "
                f"num_attention_heads, {heads}: keys and values are expanded to all heads"
            )
        experts, per_token = expert_counts(hf)
        groups, topk_groups = (1, 1) if method == "greedy" else expert_groups(hf)
        rotated = integer(hf, "qk_rope_head_dim")
        if rotated % 2:
            raise ValueError(
                f"{model_type(hf)}: qk_rope_head_dim {rotated} is odd, rotary positions need pairs "
                "of columns"
            )
        return cls.read(
            hf,
            n_routed_experts=experts,
            num_experts_per_tok=per_token,
            topk_method=method,
            n_group=groups,
            topk_group=topk_groups,
            mlp_layer_types=_mlp_layer_types(hf),
            q_lora_rank=None if hf["q_lora_rank"] is None else integer(hf, "q_lora_rank"),
            rope_parameters=rope_parameters(hf),
        )


def _mlp_layer_types(hf: JSONMapping) -> tuple[str, ...]:
    """By default, the first first_k_dense_replace layers are dense."""
    layers, dense = integer(hf, "num_hidden_layers"), count(hf, "first_k_dense_replace", 0)
    default = ["dense" if i < dense else "sparse" for i in range(layers)]
    return layer_types(hf, default, ("dense", "sparse"), "mlp_layer_types")


def _attention_scale(config: Config) -> float:
    """1 / sqrt(H), times the temperature of YaRN for q and k (DeepSeek-V2, section 3.1.4)."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return scale
    mscale = yarn_mscale(number(rope, "factor"), number(rope, "mscale_all_dim"))
    return scale * mscale * mscale


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, section 2.1, equations 9 to 19)."""

    def __init__(self, config: Config):
        super().__init__()
        width, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.nope, self.rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent, self.v_head_dim = config.kv_lora_rank, config.v_head_dim
        self.head_dim = self.nope + self.rotated
        self.scale = _attention_scale(config)
        self.rope_interleave = config.rope_interleave
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent + self.rotated, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent, LATENT_EPS)
        self.kv_b_proj = nn.Linear(self.latent, heads * (self.nope + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, width, bias=bias)
        self.kv = ops.kv_state(heads, self.head_dim)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_TNH, k_TNH, v_TNV = self.expanded(self._queries(x_TD), x_TD, cos, sin)
        out_TNV = ops.attention(q_TNH, k_TNH, v_TNV, self.kv, scale=self.scale)
        out_TD: Tensor = self.o_proj(out_TNV.flatten(-2))
        return out_TD

    def expanded(
        self, q: Tensor, x_TD: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H] of q [T, N * H], and keys [T, N, H] and values [T, N, V] of x."""
        q_TNH = torch.unflatten(q, -1, (-1, self.head_dim))
        q_nope, q_rope = torch.split(q_TNH, [self.nope, self.rotated], -1)
        latent_TL, k_rope = self.kv_a_proj_with_mqa(x_TD).split([self.latent, self.rotated], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent_TL))
        kv = kv.unflatten(-1, (-1, self.nope + self.v_head_dim))
        k_nope, v_TNV = kv.split([self.nope, self.v_head_dim], -1)
        rotate = apply_interleaved_rope if self.rope_interleave else apply_rope
        q_rope, k_rope = rotate(q_rope, k_rope.unsqueeze(-2), cos, sin)
        k_rope = k_rope.expand(*k_nope.shape[:-1], -1)
        q_TNH = torch.cat((q_nope, q_rope), -1)
        k_TNH = torch.cat((k_nope, k_rope), -1)
        return q_TNH, k_TNH, v_TNV

    def _queries(self, x_TD: Tensor) -> Tensor:
        if self.q_lora_rank is None:
            q: Tensor = self.q_proj(x_TD)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TD)))
        return q


class SoftmaxRouter(nn.Module):
    """The experts of each token, and their weights (DeepSeek-V2, section 2.2): softmax scores in
    fp32; the choice is from the groups with the best experts.
    """

    def __init__(self, config: GroupedExpertsConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """-> ids [T, k] i64, weights [T, k] f32."""
        config = self.config
        scores_TE = F.linear(x_TD.float(), self.weight.float()).softmax(-1)
        if config.n_group > 1:
            best = torch.unflatten(scores_TE, -1, (config.n_group, -1)).max(-1).values
            scores_TE = mask_other_groups(scores_TE, best, config.topk_group, 0.0)
        weights, ids = scores_TE.topk(config.num_experts_per_tok, dim=-1, sorted=False)
        return ids, weights * config.routed_scaling_factor


def moe_of(config: Config) -> MoE:
    is_softmax = ROUTERS[config.topk_method] == "softmax"
    return MoE(config, SoftmaxRouter if is_softmax else GroupRouter)


def mlp_of(config: Config, kind: str) -> nn.Module:
    """The MLP of a layer; kind: of mlp_layer_types."""
    return moe_of(config) if kind == "sparse" else MLP(config.hidden_size, config.intermediate_size)


class DeepseekV3ForCausalLM(WithNumberedDraftLayers):
    """draft_layers: how many of the checkpoint's."""

    config_class: ClassVar[type[DecoderConfig]] = Config
    attention_class: ClassVar[type[Attention]] = Attention
    # The projections to the latents and their norms are on every device.
    SHARD = DECODER_SHARD | {"q_b_proj": "colwise", "kv_b_proj": "colwise"}
    # Of the config class of transformers.
    DEFAULTS: ClassVar[dict[str, JSONLike]] = {
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }

    def __init__(self, config: Config, *, draft_layers: int = 0):
        attention = self.attention_class
        layers = (
            Layer(config, attention(config), mlp_of(config, kind))
            for kind in config.mlp_layer_types
        )
        rotary_emb = Rotary(config.rope_parameters, config.qk_rope_head_dim)
        drafts = (
            DraftLayer(config, attention(config), moe_of(config)) for _ in range(draft_layers)
        )
        super().__init__(config, layers, rotary_emb, drafts=drafts)

    @classmethod
    def from_hf(cls, hf: JSONMapping, *, draft_layers: int = 0) -> Self:
        fields = {name: x for name, x in hf.items() if x is not None or name == "q_lora_rank"}
        return super().from_hf({**cls.DEFAULTS, **fields}, draft_layers=draft_layers)


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """Another router. transformers rotates in fp32 where this file does so in x.dtype, as
    DeepSeek's first code.
    """

    DEFAULTS: ClassVar[dict[str, JSONLike]] = {
        **DeepseekV3ForCausalLM.DEFAULTS,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": None,
        "topk_group": None,
        "num_experts_per_tok": None,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
    }


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    DEFAULTS: ClassVar[dict[str, JSONLike]] = {
        **DeepseekV3ForCausalLM.DEFAULTS,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
    }
