"""Draft layers for multi-token prediction (MTP): DeepSeek-V3, section 2.2.

A draft layer predicts the token after the next one: it is a decoder layer over the hidden state of
each token and the embedding of the next token. It has its own key/value state. Its embedding and
head are those of the model, of which checkpoints may store copies.

T tokens, D model width, R rows with logits, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from atomc.models.decoder import CausalLM, DecoderConfig, Layer
from atomc.models.layers import RMSNorm


class SharedHead(nn.Module):
    """The norm before the model's head."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)


class DraftLayer(Layer):
    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps)
        self.hnorm = RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = SharedHead(width, eps)

    def merge(self, embeddings_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """The input of the decoder layer."""
        both = torch.cat([self.enorm(embeddings_TD), self.hnorm(hidden_TD)], -1)
        x_TD: Tensor = self.eh_proj(both)
        return x_TD


class DraftModel(nn.Module):
    """The first draft layer of a model, between the model's embedding and head, whose parameters it
    shares.

    reads   names of the model's layers whose results [T, D] are its hidden states. A draft model of
            its own (EAGLE3) may read several: it gets, and returns, their columns side by side
    """

    reads = ("model.norm",)

    def __init__(
        self,
        embed_tokens: nn.Module,
        rotary_emb: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        layer: DraftLayer,
        lm_head: nn.Module,
    ):
        super().__init__()
        self.embed_tokens, self.rotary_emb = embed_tokens, rotary_emb
        self.layer, self.lm_head = layer, lm_head

    @property
    def hidden_size(self) -> int:
        return len(self.layer.hnorm.weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.hnorm.weight.dtype

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, logits_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """-> logits [R, V] and hidden states [R, D] of the tokens logits_rows [R] i64.

        input_ids   [T] i64, the token after each token
        positions   [T] i64, of each token
        hidden      [T, D], the hidden state of each token
        """
        x_TD = self.layer.merge(self.embed_tokens(input_ids), hidden)
        cos, sin = self.rotary_emb(x_TD, positions)
        x_RD = self.layer(x_TD, cos, sin).index_select(-2, logits_rows)
        logits: Tensor = self.lm_head(self.layer.shared_head.norm(x_RD))
        return logits, x_RD


class WithDraftLayer(CausalLM):
    """A model that implements draft layers. The draft layer, if it was made, is the last of
    `model.layers`.
    """

    def draft_model(self) -> DraftModel:
        """Raises ValueError for a model that was made without its draft layer."""
        inner, layer = self.model, self.model.layers[-1]
        if not isinstance(layer, DraftLayer):
            name = type(self).__name__
            raise ValueError(f"{name} was made without its draft layer: draft_layer=True")
        return DraftModel(inner.embed_tokens, inner.rotary_emb, layer, self.lm_head)
