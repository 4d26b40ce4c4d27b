"""Qwen3-VL (Bai et al. 2025): Qwen3 that reads images. Tokens have positions of three kinds
(M-RoPE), and some layers of the vision encoder add to the first layers of the language model
(DeepStack, Meng et al. 2024).
"""

from typing import Self

from atomc.files.json_types import JSONMapping
from atomc.models import qwen3
from atomc.models.config import flag
from atomc.models.vision_language import Images, ImageTokens, VisionLanguageModel, part

# Of transformers' config classes, where they differ from Qwen3's.
TEXT_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 128000,
    "rope_theta": 500000.0,
}
MROPE_SECTION = (24, 20, 20)
DEEPSTACK = (8, 16, 24)


class Qwen3VLForConditionalGeneration(VisionLanguageModel):
    def __init__(self, text: qwen3.Config, images: Images):
        layers = (qwen3.layer_of(text, window=0) for _ in range(text.num_hidden_layers))
        super().__init__(text, images, layers, text.head_dim)

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        tied = {"tie_word_embeddings": flag(hf, "tie_word_embeddings")}
        text = qwen3.Config.from_hf({**TEXT_DEFAULTS, **part(hf, "text_config"), **tied})
        tokens = ImageTokens.from_hf(hf, image=151655, video=151656)
        section, deepstack = MROPE_SECTION, DEEPSTACK
        images = Images.from_hf(hf, text, tokens, section=section, deepstack=deepstack)
        return cls(text, images)
