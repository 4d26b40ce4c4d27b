"""Qwen3.5 with its vision encoder, which is that of Qwen3-VL without DeepStack. The language model
is dense, or has experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from atomc.files.json_types import JSONLike
from atomc.models import qwen3_5, qwen3_5_moe
from atomc.models.config import flag
from atomc.models.decoder import DECODER_SHARD
from atomc.models.layers import OnePlusRMSNorm
from atomc.models.mrope import MRotary, mrope_section
from atomc.models.mtp import WithMTP
from atomc.models.qwen3_vl_vision import VisionConfig
from atomc.models.vision_language import (
    ImageDraftModel,
    ImageTokens,
    VisionLanguageModel,
    part,
    vision_config,
)

# The vision encoder is on every device.
SHARD = DECODER_SHARD
# Of transformers' config classes.
MROPE_SECTION = (11, 11, 10)

Text = qwen3_5.Config | qwen3_5_moe.Config


@dataclass(frozen=True)
class Images:
    """The part of a config that is not the language model's."""

    vision_config: VisionConfig
    tokens: ImageTokens
    mrope_section: tuple[int, int, int]

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike], text: Text) -> "Images":
        """Raises ValueError for a missing field or an unsupported value."""
        return cls(
            vision_config=vision_config(hf, text.hidden_size, None),
            tokens=ImageTokens.from_hf(hf, image=248056, video=248057),
            mrope_section=mrope_section(hf, text.rope_parameters, MROPE_SECTION),
        )

    def rotary(self, text: Text) -> MRotary:
        return MRotary(text.rope_parameters, text.rotated_columns, self.mrope_section)


class Qwen3_5ForConditionalGeneration(VisionLanguageModel, WithMTP):
    """draft_layer: with the checkpoint's draft layer."""

    draft_class = ImageDraftModel
    text_class: ClassVar[type[qwen3_5.Config] | type[qwen3_5_moe.Config]] = qwen3_5.Config

    def __init__(self, text: Text, images: Images, *, draft_layer: bool = False):
        layers = (qwen3_5.layer_of(text, kind) for kind in text.layer_types)
        parts = images.vision_config, images.tokens
        super().__init__(text, *parts, layers, images.rotary(text), norm=OnePlusRMSNorm)
        self.mtp = qwen3_5.draft_layer_of(text) if draft_layer else None

    @classmethod
    def from_hf(cls, hf: Mapping[str, JSONLike], *, draft_layer: bool = False) -> Self:
        tied = {"tie_word_embeddings": flag(hf, "tie_word_embeddings")}
        text = cls.text_class.from_hf({**part(hf, "text_config"), **tied})
        return cls(text, Images.from_hf(hf, text), draft_layer=draft_layer)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    text_class = qwen3_5_moe.Config
