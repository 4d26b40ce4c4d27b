"""The frame of a language model that reads images: a vision encoder, a decoder that takes
embeddings, and its head. Names are those of Hugging Face.

P patches, I tokens of images, T tokens, D model width, L layers that add embeddings, E = D * (1 +
L), V vocabulary, R rows with logits.
Tokens are flat, [T]; [B, T] works as well, every tensor of tokens then has B before T.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from atomc.files.json_types import JSONLike, JSONMapping
from atomc.models.config import DecoderConfig, integer, model_type
from atomc.models.decoder import DECODER_SHARD, Decoder, Norm
from atomc.models.layers import RMSNorm
from atomc.models.mrope import MRotary, mrope_section
from atomc.models.mtp import DraftModel
from atomc.models.qwen3_vl_vision import VisionConfig, VisionEncoder
from atomc.models.vision_patches import EncodesImages
from atomc.ops.inputs import PatchInputs


class ImageTokens(NamedTuple):
    """The tokens that stand for parts of images and of videos."""

    image_token_id: int
    video_token_id: int

    @classmethod
    def from_hf(cls, hf: JSONMapping, image: int, video: int) -> "ImageTokens":
        """image, video: the ids of a config without the fields."""
        return cls(integer(hf, "image_token_id", image), integer(hf, "video_token_id", video))


def part(hf: JSONMapping, name: str) -> dict[str, JSONLike]:
    """A nested config. Raises ValueError if it is no object."""
    nested = hf.get(name)
    if not isinstance(nested, dict):
        raise ValueError(f"{model_type(hf)}: {name} {nested!r:.40} is not an object")
    return nested


class Images(NamedTuple):
    """The part of a config that is not the language model's.

    mrope_section  as mrope.mrope_section returns it
    """

    vision: VisionConfig
    tokens: ImageTokens
    mrope_section: tuple[int, int, int]

    @classmethod
    def from_hf(
        cls,
        hf: JSONMapping,
        text: DecoderConfig,
        tokens: ImageTokens,
        *,
        section: tuple[int, int, int],
        deepstack: tuple[int, ...] | None,
    ) -> "Images":
        """section: of a config without the field; deepstack: as in VisionConfig.from_hf.

        Raises ValueError for a missing field or an unsupported value.
        """
        vision = VisionConfig.from_hf(part(hf, "vision_config"), deepstack)
        if vision.out_hidden_size != text.hidden_size:
            raise ValueError(
                f"{model_type(hf)}: out_hidden_size {vision.out_hidden_size} of vision_config is "
                f"not the hidden_size {text.hidden_size} of text_config"
            )
        return cls(vision, tokens, mrope_section(hf, text.rope_parameters, section))


def placed(x_TD: Tensor, embeddings: Tensor, is_image: Tensor) -> tuple[Tensor, ...]:
    """x with the embeddings [T, E] of images in the rows is_image [T], and all rows of the other
    columns, of each layer [T, D].
    """
    image_TD, *levels = torch.split(embeddings.to(x_TD.dtype), x_TD.shape[-1], -1)
    return torch.where(is_image.unsqueeze(-1), image_TD, x_TD), *levels


class TextModel(Decoder):
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] i64, positions [T] or [3, T] i64 -> [T, D]. Tokens is_image [T] have the
        embeddings [T, E]: first that of the token, then what each of the first layers adds.
        """
        x_TD: Tensor = self.embed_tokens(input_ids)
        added: tuple[Tensor, ...] = ()
        if embeddings is not None and is_image is not None:
            x_TD, *levels = placed(x_TD, embeddings, is_image)
            added = tuple(level.where(is_image.unsqueeze(-1), 0) for level in levels)
        cos, sin = self.rotary_emb(x_TD, positions)
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, cos, sin)
            if i < len(added):
                x_TD = x_TD + added[i]
        x_TD = self.norm(x_TD)
        return x_TD


class Model(nn.Module):
    def __init__(self, visual: VisionEncoder, language_model: TextModel):
        super().__init__()
        self.visual = visual
        self.language_model = language_model


class VisionLanguageModel(nn.Module, EncodesImages):
    """config: that of the language model, whose fields the runtime reads."""

    SHARD: ClassVar[Mapping[str, str]] = DECODER_SHARD

    def __init__(
        self,
        config: DecoderConfig,
        images: Images,
        layers: Iterable[nn.Module],
        rotated_columns: int,
        *,
        norm: Norm = RMSNorm,
    ):
        super().__init__()
        self.config = config
        vision = images.vision
        rotary_emb = MRotary(config.rope_parameters, rotated_columns, images.mrope_section)
        self.image_token_ids = frozenset(images.tokens)
        self.merge_size = vision.spatial_merge_size
        self.patch_width = vision.patch_width
        self.table_side = vision.table_side
        self.embedding_width = config.hidden_size * (1 + len(vision.deepstack_visual_indexes))
        text = TextModel(config, layers, rotary_emb, (), norm)
        self.model = Model(VisionEncoder(vision), text)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = text.embed_tokens.weight

    @property
    def decoder(self) -> Decoder:
        return self.model.language_model

    def encode_patches(self, pixels: Tensor, patches: PatchInputs) -> Tensor:
        embeddings: Tensor = self.model.visual(pixels, patches)
        return embeddings

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor | None = None,
        embeddings: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] i64 and positions [T] or [3, T] i64 -> logits [T, V], or [R, V] of the
        tokens logits_rows [R] i64. Tokens is_image [T] have the embeddings [T, E]; other rows of
        these are not read.
        """
        x_TD = self.model.language_model(input_ids, positions, embeddings, is_image)
        if logits_rows is not None:
            x_TD = x_TD.index_select(-2, logits_rows)
        logits: Tensor = self.lm_head(x_TD)
        return logits


class ImageDraftModel(DraftModel):
    """A draft layer that reads the embeddings of images, as the model does."""

    reads = ("model.language_model.norm",)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        logits_rows: Tensor,
        embeddings: Tensor | None = None,
        is_image: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As DraftModel.forward; positions [T] or [3, T]. embeddings [T, E] and is_image [T] are
        those of the token after each token.
        """
        x_TD: Tensor = self.embed_tokens(input_ids)
        if embeddings is not None and is_image is not None:
            x_TD, *_ = placed(x_TD, embeddings, is_image)
        return self.run_layer(x_TD, positions, hidden, logits_rows)
