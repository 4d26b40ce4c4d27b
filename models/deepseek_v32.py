"""DeepSeek-V3.2: DeepSeek-V3 whose attention reads the keys that an indexer chooses.

T tokens, D model width, N heads, J heads of the indexer, C width of its queries and keys, of which
the first R columns are rotated; K chosen keys.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONLike, JSONMapping
from atomc.models import deepseek_v3
from atomc.models.config import integer, model_type, only
from atomc.models.rotary import apply_partial_rope

INDEX_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3.Config):
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        config = super().from_hf(hf)
        only(hf, "rope_interleave", True)
        if hf.get("q_lora_rank") is None:
            raise ValueError(
                f"{model_type(hf)}: q_lora_rank is null, and the indexer reads the latent of the "
                "queries"
            )
        layers = hf.get("layer_types")
        count = integer(hf, "num_hidden_layers")
        # The second is the name in transformers 5.17.
        names = ("indexed_attention", "deepseek_sparse_attention")
        if layers is not None and layers not in [[name] * count for name in names]:
            raise ValueError(
                f"{model_type(hf)}: layer_types {layers!r:.60} is not supported, only "
                "'indexed_attention' in each layer"
            )
        width, rotated = config.index_head_dim, config.qk_rope_head_dim
        if width < rotated:
            raise ValueError(
                f"{model_type(hf)}: index_head_dim {width} is less than qk_rope_head_dim {rotated}"
            )
        return config


class Indexer(nn.Module):
    """Chooses the keys that attention of each token reads (DeepSeek-V3.2, section 2.1). The factors
    of its scores, 1 / sqrt(C) and 1 / sqrt(J), change no choice.
    """

    def __init__(self, config: Config):
        super().__init__()
        assert config.q_lora_rank is not None
        heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.wq_b = nn.Linear(config.q_lora_rank, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=INDEX_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.keys = ops.indexer_state(self.head_dim)

    def forward(self, x_TD: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, D] and the latent of its queries -> positions [T, K] i32."""
        q_TJC = self.wq_b(q_latent).unflatten(-1, (-1, self.head_dim))
        k_T1C = self.k_norm(self.wk(x_TD)).unsqueeze(-2)
        q_TJC, k_T1C = apply_partial_rope(q_TJC, k_T1C, cos, sin)
        weights_TJ = self.weights_proj(x_TD)
        return ops.index_topk(q_TJC, k_T1C.squeeze(-2), weights_TJ, self.keys, topk=self.topk)


class Attention(deepseek_v3.Attention):
    def __init__(self, config: Config):
        super().__init__(config)
        self.indexer = Indexer(config)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_latent = self.q_a_layernorm(self.q_a_proj(x_TD))
        positions_TK = self.indexer(x_TD, q_latent, cos, sin)
        q_TNH, k_TNH, v_TNV = self.expanded(self.q_b_proj(q_latent), x_TD, cos, sin)
        mask = ops.chosen_mask(positions_TK)
        out_TNV = ops.attention(q_TNH, k_TNH, v_TNV, self.kv, mask, scale=self.scale)
        out_TD: Tensor = self.o_proj(out_TNV.flatten(-2))
        return out_TD


class DeepseekV32ForCausalLM(deepseek_v3.DeepseekV3ForCausalLM):
    config_class = Config
    attention_class = Attention
    DEFAULTS: ClassVar[dict[str, JSONLike]] = {
        **deepseek_v3.DeepseekV3ForCausalLM.DEFAULTS,
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    }
