"""Draft layers for multi-token prediction (MTP): DeepSeek-V3, section 2.2.

A draft layer predicts the token after the next one: it is a decoder layer over the hidden state of
each token and the embedding of the next token. It has its own key/value state. Its embedding and
head are those of the model, of which checkpoints may store copies.

Checkpoints have it in one of two forms: numbered behind the model's layers (DeepSeek, GLM), or as a
part `mtp` of the model (Qwen).

T tokens, D model width, R rows with logits, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from atomc.files.json_types import JSONMapping
from atomc.models.config import DecoderConfig, count, integer, only, text_config
from atomc.models.decoder import CausalLM, Decoder, Layer
from atomc.models.layers import OnePlusRMSNorm, RMSNorm


class SharedHead(nn.Module):
    """The norm before the model's head."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)


class DraftLayer(Layer):
    """The form of DeepSeek: a further token is predicted from the result of the layer."""

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

    def results(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the head, and the hidden states, after the decoder layer."""
        return self.shared_head.norm(x_RD), x_RD


class MTP(nn.Module):
    """The form of Qwen3-Next: a further token is predicted from the normed result of the layer, as
    the first one is from that of the model.

    layer  a decoder layer with attention
    """

    def __init__(self, config: DecoderConfig, layer: nn.Module):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = OnePlusRMSNorm(width, eps)
        self.pre_fc_norm_hidden = OnePlusRMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([layer])
        self.norm = OnePlusRMSNorm(width, eps)

    def merge(self, embeddings_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """The input of the decoder layer."""
        embeddings_TD = self.pre_fc_norm_embedding(embeddings_TD)
        both = torch.cat([embeddings_TD, self.pre_fc_norm_hidden(hidden_TD)], -1)
        x_TD: Tensor = self.fc(both)
        return x_TD

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, D], cos and sin [T, 1, H] -> [T, D]."""
        out_TD: Tensor = self.layers[0](x_TD, cos, sin)
        return out_TD

    def results(self, x_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the head, and the hidden states, after the decoder layer: both are one."""
        normed_RD: Tensor = self.norm(x_RD)
        return normed_RD, normed_RD


class DraftModel(nn.Module):
    """A model's first draft layer, between its embedding and head, whose parameters it shares.

    reads   names of the model's layers whose results [T, D] are its hidden states. A draft model of
            its own (EAGLE3) may read several: it gets, and returns, their columns side by side
    """

    reads: tuple[str, ...] = ("model.norm",)

    def __init__(
        self,
        embed_tokens: nn.Embedding,
        rotary_emb: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        layer: DraftLayer | MTP,
        lm_head: nn.Module,
    ):
        super().__init__()
        self.embed_tokens, self.rotary_emb = embed_tokens, rotary_emb
        self.layer, self.lm_head = layer, lm_head

    @property
    def hidden_size(self) -> int:
        return self.embed_tokens.weight.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, logits_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """-> logits [R, V] and hidden states [R, D] of the tokens logits_rows [R] i64.

        input_ids   [T] i64, the token after each token
        positions   [T] i64, of each token
        hidden      [T, D], the hidden state of each token
        """
        return self.run_layer(self.embed_tokens(input_ids), positions, hidden, logits_rows)

    def run_layer(
        self, x_TD: Tensor, positions: Tensor, hidden: Tensor, logits_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As forward, from the embeddings of the tokens after each token."""
        x_TD = self.layer.merge(x_TD, hidden)
        cos, sin = self.rotary_emb(x_TD, positions)
        x_RD = self.layer(x_TD, cos, sin).index_select(-2, logits_rows)
        to_head_RD, hidden_RD = self.layer.results(x_RD)
        logits: Tensor = self.lm_head(to_head_RD)
        return logits, hidden_RD


class StoredDraft(NamedTuple):
    """What config.json says about the draft layers of a checkpoint.

    layers, field  how many there are, and the field that says so
    prefix         what the names of the first one's tensors begin with
    """

    layers: int
    field: str
    prefix: str


class WithDraftLayer(ABC):
    """A model that implements draft layers: its from_hf takes draft_layer=True."""

    @classmethod
    @abstractmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        """Raises ValueError for a draft layer that is not implemented."""

    @abstractmethod
    def draft_model(self) -> DraftModel:
        """Raises ValueError for a model that was made without its draft layer."""

    def _missing_layer(self) -> ValueError:
        name = type(self).__name__
        return ValueError(f"{name} was made without its draft layer: draft_layer=True")


class WithNumberedDraftLayer(WithDraftLayer, CausalLM):
    """The draft layer, if it was made, is the last of `model.layers`."""

    @classmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        field = "num_nextn_predict_layers"
        prefix = f"model.layers.{integer(hf, 'num_hidden_layers')}."
        return StoredDraft(count(hf, field, 0), field, prefix)

    def draft_model(self) -> DraftModel:
        inner, layer = self.model, self.model.layers[-1]
        if not isinstance(layer, DraftLayer):
            raise self._missing_layer()
        return DraftModel(inner.embed_tokens, inner.rotary_emb, layer, self.lm_head)


class WithMTP(WithDraftLayer):
    """The draft layer is `mtp`; None in a model that was made without.

    draft_class  that of the draft model
    """

    mtp: MTP | None
    lm_head: nn.Linear
    draft_class: ClassVar[type[DraftModel]] = DraftModel

    @classmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        """The config of Qwen3-Next has no field for its draft layer."""
        text = text_config(hf)
        only(text, "mtp_use_dedicated_embeddings", False)
        fields = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        field = next((name for name in fields if name in text), fields[0])
        return StoredDraft(count(text, field, 1), field, "mtp.")

    @property
    @abstractmethod
    def decoder(self) -> Decoder: ...

    def draft_model(self) -> DraftModel:
        if self.mtp is None:
            raise self._missing_layer()
        inner = self.decoder
        return self.draft_class(inner.embed_tokens, inner.rotary_emb, self.mtp, self.lm_head)
