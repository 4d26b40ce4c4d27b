"""Qwen3.5 with its vision encoder, which is that of Qwen3-VL without DeepStack. The language model
is dense, or has experts.
"""

from typing import ClassVar, Self

from atomc.files.json_types import JSONMapping
from atomc.models import qwen3_5, qwen3_5_moe
from atomc.models.config import flag
from atomc.models.layers import OnePlusRMSNorm
from atomc.models.mtp import WithMTP
from atomc.models.vision_language import (
    ImageDraftModel,
    Images,
    ImageTokens,
    VisionLanguageModel,
    part,
)

# Of transformers' config classes.
MROPE_SECTION = (11, 11, 10)

Text = qwen3_5.Config | qwen3_5_moe.Config


class Qwen3_5ForConditionalGeneration(VisionLanguageModel, WithMTP):
    """draft_layer: with the checkpoint's draft layer."""

    draft_class = ImageDraftModel
    text_class: ClassVar[type[qwen3_5.Config] | type[qwen3_5_moe.Config]] = qwen3_5.Config

    def __init__(self, text: Text, images: Images, *, draft_layer: bool = False):
        layers = (qwen3_5.layer_of(text, kind) for kind in text.layer_types)
        super().__init__(text, images, layers, text.rotated_columns, norm=OnePlusRMSNorm)
        self.mtp = qwen3_5.draft_layer_of(text) if draft_layer else None

    @classmethod
    def from_hf(cls, hf: JSONMapping, *, draft_layer: bool = False) -> Self:
        tied = {"tie_word_embeddings": flag(hf, "tie_word_embeddings")}
        text = cls.text_class.from_hf({**part(hf, "text_config"), **tied})
        tokens = ImageTokens.from_hf(hf, image=248056, video=248057)
        images = Images.from_hf(hf, text, tokens, section=MROPE_SECTION, deepstack=None)
        return cls(text, images, draft_layer=draft_layer)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    text_class = qwen3_5_moe.Config
