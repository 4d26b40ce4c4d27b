"""Qwen3.5 with its vision encoder, which is that of Qwen3-VL without DeepStack. The language model
is dense, or has experts.
"""

from typing import ClassVar, Self

from atomc.files.json_types import JSONMapping
from atomc.models import qwen3_5, qwen3_5_moe
from atomc.models.config import flag
from atomc.models.layers import OnePlusRMSNorm
from atomc.models.mtp import StoredDraft, WithMTP
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
    """draft_layers: how many of the checkpoint's: one at most."""

    draft_class = ImageDraftModel
    text_class: ClassVar[type[qwen3_5.Config] | type[qwen3_5_moe.Config]] = qwen3_5.Config

    def __init__(self, text: Text, images: Images, *, draft_layers: int = 0):
        layers = (qwen3_5.layer_of(text, kind) for kind in text.layer_types)
        super().__init__(text, images, layers, text.rotated_columns, norm=OnePlusRMSNorm)
        self.mtp = qwen3_5.draft_layers_of(text, draft_layers)

    @classmethod
    def stored_draft(cls, hf: JSONMapping) -> StoredDraft:
        stored = super().stored_draft(hf)
        if stored.layers > 1:
            raise ValueError(
                f"{cls.__name__} has {stored.layers} draft layers ({stored.field}), and a model "
                f"that reads images supports one: set {stored.field} to 1 in config.json, and the "
                "first proposes all draft tokens"
            )
        return stored

    @classmethod
    def from_hf(cls, hf: JSONMapping, *, draft_layers: int = 0) -> Self:
        tied = {"tie_word_embeddings": flag(hf, "tie_word_embeddings")}
        text = cls.text_class.from_hf({**part(hf, "text_config"), **tied})
        tokens = ImageTokens.from_hf(hf, image=248056, video=248057)
        images = Images.from_hf(hf, text, tokens, section=MROPE_SECTION, deepstack=None)
        return cls(text, images, draft_layers=draft_layers)


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    text_class = qwen3_5_moe.Config
