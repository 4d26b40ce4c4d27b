"""Qwen3-VL (Bai et al. 2025): Qwen3 that reads images. Tokens of images have embeddings from a
vision encoder, and positions of three kinds (M-RoPE); some layers of the encoder add to the first
layers of the language model (DeepStack).

I tokens of images, P patches, T tokens, D model width, L layers of the language model that add
embeddings, E = D * (1 + L), V vocabulary, R rows with logits.
Tokens are flat, [T]; [B, T] works as well, every tensor of tokens then has B before T.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atomc.json_types import JSONLike
from atomc.models import qwen3
from atomc.models.config import flag, integer, model_type
from atomc.models.decoder import DECODER_SHARD, Decoder, Layer
from atomc.models.layers import MLP, RMSNorm
from atomc.models.mrope import MRotary, mrope_section
from atomc.models.qwen3_vl_vision import VisionConfig, VisionModel
from atomc.models.vision_patches import EncodesImages

# The vision encoder is on every device.
SHARD = DECODER_SHARD
# Defaults of transformers' config class that differ from those of Qwen3.
TEXT_DEFAULTS = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
MROPE_SECTION = (24, 20, 20)
DEEPSTACK = (8, 16, 24)


@dataclass(frozen=True)
class Config:
    text_config: qwen3.Config
    vision_config: VisionConfig
    mrope_section: tuple[int, int, int]
    image_token_id: int
    video_token_id: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Config":
        """Raises ValueError for a missing field or an unsupported value."""
        tied = {"tie_word_embeddings": flag(hf, "tie_word_embeddings")}
        text = qwen3.Config.from_hf({**TEXT_DEFAULTS, **part(hf, "text_config"), **tied})
        return cls(
            text_config=text,
            vision_config=vision_config(hf, text.hidden_size, DEEPSTACK),
            mrope_section=mrope_section(hf, text.rope_parameters, MROPE_SECTION),
            image_token_id=integer(hf, "image_token_id", 151655),
            video_token_id=integer(hf, "video_token_id", 151656),
        )


def part(hf: Mapping[str, JSONLike], name: str) -> dict[str, JSONLike]:
    """A nested config. Raises ValueError if it is no object."""
    found = hf.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"{model_type(hf)}: {name} {found!r:.40} is not an object")
    return found


def vision_config(
    hf: Mapping[str, JSONLike], width: int, deepstack: tuple[int, ...]
) -> VisionConfig:
    """The config of an encoder for a language model of this width."""
    found = VisionConfig.from_hf(part(hf, "vision_config"), deepstack)
    if found.out_hidden_size != width:
        raise ValueError(
            f"{model_type(hf)}: out_hidden_size {found.out_hidden_size} of vision_config is not "
            f"the hidden_size {width} of text_config"
        )
    return found


class TextModel(Decoder):
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] i64, positions [T] or [3, T] i64; tokens is_image [T] have the embeddings
        [T, E] -> [T, D].
        """
        x_TD: Tensor = self.embed_tokens(input_ids)
        added: tuple[Tensor, ...] = ()
        if embeddings is not None and is_image is not None:
            rows = is_image.unsqueeze(-1)
            image_TD, *levels = torch.split(embeddings.to(x_TD.dtype), x_TD.shape[-1], -1)
            x_TD = torch.where(rows, image_TD, x_TD)
            added = tuple(level.where(rows, 0) for level in levels)
        cos, sin = self.rotary_emb(x_TD, positions)
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, cos, sin)
            if i < len(added):
                x_TD = x_TD + added[i]
        x_TD = self.norm(x_TD)
        return x_TD


class Model(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        text = config.text_config
        self.visual = VisionModel(config.vision_config)
        mlps = (MLP(text.hidden_size, text.intermediate_size) for _ in text.layer_types)
        layers = (Layer(text, qwen3.Attention(text, window=0), mlp) for mlp in mlps)
        rotary = MRotary(text.rope_parameters, text.head_dim, config.mrope_section)
        self.language_model = TextModel(text, layers, rotary, None, RMSNorm)


class Qwen3VLForConditionalGeneration(nn.Module, EncodesImages):
    def __init__(self, config: Config):
        super().__init__()
        text, vision = config.text_config, config.vision_config
        # The runtime reads the fields of the language model here.
        self.config = text
        self.image_token_ids = frozenset({config.image_token_id, config.video_token_id})
        self.merge_size = vision.spatial_merge_size
        self.patch_width = vision.patch_width
        self.embedding_width = text.hidden_size * (1 + len(vision.deepstack_visual_indexes))
        self.table_side = vision.table_side
        self.model = Model(config)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        if text.tie_word_embeddings:
            self.lm_head.weight = self.model.language_model.embed_tokens.weight

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike]) -> "Qwen3VLForConditionalGeneration":
        return cls(Config.from_hf(hf))

    def encode_patches(
        self,
        pixels: Tensor,
        query_start: Tensor,
        coordinates: Tensor,
        corners: Tensor,
        weights: Tensor,
    ) -> Tensor:
        found: Tensor = self.model.visual(pixels, query_start, coordinates, corners, weights)
        return found

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor | None = None,
        embeddings: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] i64 and positions [T] or [3, T] i64 -> logits [T, V], or [R, V] of the
        tokens logits_rows [R] i64. The tokens is_image [T] have the embeddings [T, E]; other rows
        of these are not read.
        """
        x_TD = self.model.language_model(input_ids, positions, embeddings, is_image)
        if logits_rows is not None:
            x_TD = x_TD.index_select(-2, logits_rows)
        logits: Tensor = self.lm_head(x_TD)
        return logits
