"""Draft layers for multi-token prediction (MTP): DeepSeek-V3, section 2.2.

A draft layer predicts the token after the next one: it is a decoder layer over the hidden state of
each token and the embedding of the next token. It has its own key/value state. Its embedding and
head are those of the model, of which checkpoints may store copies. Of several draft layers, each
reads the hidden states of the one before, and the embedding of one token further.

Checkpoints have them in one of two forms: numbered behind the model's layers (DeepSeek, GLM), or as
a part `mtp` of the model (Qwen).

T tokens, D model width, R rows with logits, V vocabulary.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NamedTuple, Self

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

    def results(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the head, and the hidden states, after the decoder layer."""
        return self.shared_head.norm(x_TD), x_TD


class MTP(nn.Module):
    """The form of Qwen3-Next: a further token is predicted from the normed result of the layer, as
    the first one is from that of the model.

    layers  decoder layers with attention; forward computes the first one
    """

    def __init__(self, config: DecoderConfig, layers: Iterable[nn.Module]):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = OnePlusRMSNorm(width, eps)
        self.pre_fc_norm_hidden = OnePlusRMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList(layers)
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

    def with_layer(self, index: int) -> Self:
        """The same with one of its layers alone; shares all parameters."""
        twin = copy.copy(self)
        twin._modules = {**self._modules, "layers": nn.ModuleList([self.layers[index]])}
        return twin

    def results(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the head, and the hidden states, after the decoder layer: both are one."""
        normed_TD: Tensor = self.norm(x_TD)
        return normed_TD, normed_TD


class DraftModel(nn.Module):
    """A draft layer of a model, between its embedding and head, whose parameters it shares.

    reads   names of the model's layers whose results [T, D] are the hidden states of the first
            draft layer. A draft model of its own (EAGLE3) may read several: it gets, and returns,
            their columns side by side
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
        """-> logits [R, V] of the tokens logits_rows [R] i64, and hidden states [T, D] of all.

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
        to_head_TD, hidden = self.layer.results(self.layer(x_TD, cos, sin))
        logits: Tensor = self.lm_head(to_head_TD.index_select(-2, logits_rows))
        return logits, hidden


class StoredDraft(NamedTuple):
    """What config.json says about the draft layers of a checkpoint.

    layers, field  how many there are, and the field that says so
    prefixes       what the names of their tensors begin with: of each, or of all
    """

    layers: int
    field: str
    prefixes: tuple[str, ...]


class WithDraftLayers(ABC):
    """A model that implements draft layers: its from_hf takes their number, draft_layers.

    draft_class  that of its draft models
    """

    lm_head: nn.Linear
    draft_class: ClassVar[type[DraftModel]] = DraftModel

    @classmethod
    @abstractmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        """Raises ValueError for draft layers that are not implemented."""

    @abstractmethod
    def draft_layers(self) -> Sequence[DraftLayer | MTP]:
        """Those that were made, in their order."""

    @property
    @abstractmethod
    def decoder(self) -> Decoder: ...

    def draft_models(self, count: int) -> list[DraftModel]:
        """The first `count` draft layers at most. Raises ValueError for a model that was made
        without any.
        """
        layers, inner = self.draft_layers()[:count], self.decoder
        if not layers:
            name = type(self).__name__
            raise ValueError(f"{name} was made without its draft layers: set draft_layers")
        return [
            self.draft_class(inner.embed_tokens, inner.rotary_emb, layer, self.lm_head)
            for layer in layers
        ]


class WithNumberedDraftLayers(CausalLM, WithDraftLayers):
    """The draft layers that were made are the last of `model.layers`."""

    @classmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        field, depth = "num_nextn_predict_layers", integer(hf, "num_hidden_layers")
        layers = count(hf, field, 0)
        prefixes = [f"model.layers.{depth + i}." for i in range(layers)]
        return StoredDraft(layers, field, tuple(prefixes))

    def draft_layers(self) -> Sequence[DraftLayer | MTP]:
        return [layer for layer in self.model.layers if isinstance(layer, DraftLayer)]


class WithMTP(WithDraftLayers):
    """The draft layers are those of `mtp`; None in a model that was made without."""

    mtp: MTP | None

    @classmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        """The config of Qwen3-Next has no field for its draft layer."""
        text = text_config(hf)
        only(text, "mtp_use_dedicated_embeddings", False)
        fields = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
        field = next((name for name in fields if name in text), fields[0])
        return StoredDraft(count(text, field, 1), field, ("mtp.",))

    def draft_layers(self) -> Sequence[DraftLayer | MTP]:
        mtp = self.mtp
        return [] if mtp is None else [mtp.with_layer(i) for i in range(len(mtp.layers))]
