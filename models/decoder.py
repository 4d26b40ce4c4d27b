"""The frame of a decoder, shared by the models: embedding, pre-norm layers, final norm and head.
Names are those of Hugging Face. A model with norms of its own gives their class.

T tokens, D model width, H head width, V vocabulary, R rows with logits.
Tokens are flat, [T]; [B, T] works as well, every tensor then has a leading B.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Self

from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import AttentionConfig, DecoderConfig
from atomc.models.layers import RMSNorm
from atomc.models.rotary import Rotary

# How modules and parameters are divided over devices, by the last part of their names, in the words
# of atomc.parallel.shard_plan. Others (norms, routers, indexers, vision encoders) are whole; delta
# nets are divided by heads (atomc.parallel.delta_nets).
DECODER_SHARD = {
    "embed_tokens": "embedding_rowwise",
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "experts": "moe_tp_experts",
    "down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}

# Embedding, layers and norm of a decoder in their order, as in a base_model_pp_plan.
DECODER_FRAME = ("embed_tokens", "layers", "norm")


# A class of norms: (hidden_size, eps) -> the norm.
Norm = Callable[[int, float], nn.Module]


class GroupedQueryAttention(nn.Module):
    """The projections and the state of grouped-query attention (Ainslie et al. 2023). A model adds
    the forward pass.

    window       of how many keys a query reads the last; 0: all
    queries      1, or 2 where a query head has a gate of its width
    output_bias  whether the output projection has a bias; None: if the others have
    """

    def __init__(
        self,
        config: AttentionConfig,
        window: int = 0,
        *,
        queries: int = 1,
        output_bias: bool | None = None,
    ):
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.window = config.head_dim, window
        self.scale = config.head_dim**-0.5
        self.q_proj = nn.Linear(width, queries * heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        output_bias = bias if output_bias is None else output_bias
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=output_bias)
        self.kv = ops.kv_state(kv_heads, self.head_dim)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to its input."""

    def __init__(
        self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module, norm: Norm = RMSNorm
    ):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, D], cos and sin [T, 1, H] -> [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin)
        x_TD = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    drafts  draft layers (atomc.models.mtp): the last of `layers`, as in checkpoints, and no part of
            forward
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        rotary_emb: Rotary,
        drafts: Iterable[nn.Module],
        norm: Norm,
    ):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.num_layers = len(self.layers)
        self.layers.extend(drafts)
        self.norm = norm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = rotary_emb

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids and positions [T] i64 -> [T, D]."""
        x_TD: Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(x_TD, positions)
        for layer in self.layers[: self.num_layers]:
            x_TD = layer(x_TD, cos, sin)
        x_TD = self.norm(x_TD)
        return x_TD


class CausalLM(nn.Module):
    """A decoder and its head, which may share the weight of the embedding.

    config_class  of the model; its __init__ takes such a config, and draft_layers if it has any
    SHARD         as DECODER_SHARD
    """

    config_class: ClassVar[type[DecoderConfig]]
    SHARD: ClassVar[Mapping[str, str]] = DECODER_SHARD

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        rotary_emb: Rotary,
        *,
        drafts: Iterable[nn.Module] = (),
        norm: Norm = RMSNorm,
    ):
        super().__init__()
        self.config = config
        self.model = Decoder(config, layers, rotary_emb, drafts, norm)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def from_hf(cls, hf: JSONMapping, *, draft_layers: int = 0) -> Self:
        """The model of a config.json, with so many of its draft layers.

        Raises ValueError for an invalid or unsupported field.
        """
        create: Callable[..., Self] = cls
        options = {"draft_layers": draft_layers} if draft_layers else {}
        return create(cls.config_class.from_hf(hf), **options)

    @property
    def decoder(self) -> Decoder:
        return self.model

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor | None = None
    ) -> Tensor:
        """input_ids and positions [T] i64 -> logits [T, V], or [R, V] of logits_rows [R] i64."""
        x_TD = self.model(input_ids, positions)
        if logits_rows is not None:
            x_TD = x_TD.index_select(-2, logits_rows)
        logits: Tensor = self.lm_head(x_TD)
        return logits
