"""What the runtime reads of a model with a vision encoder.

E width of the embeddings, D that of the model: E = D * (1 + number of layers that read them again)
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ImageModel:
    """A module with these attributes, and the methods:

        encode_images(pixels [P, W], grids) -> [I, E], the embeddings of the tokens of these images
        forward(input_ids, positions, logits_rows, embeddings [T, E], is_image [T])

    With `encode_patches` (atomc.encoder), the encoder is compiled.

    token_ids     of images: module.image_token_ids
    merge_size    a token stands for merge_size x merge_size patches
    patch_width   W, the values of a patch
    width, dtype  E, and the dtype of embeddings
    mrope         positions are [3, T]; True unless module.mrope is False
    """

    token_ids: frozenset[int]
    merge_size: int
    patch_width: int
    width: int
    dtype: torch.dtype
    mrope: bool

    @classmethod
    def of(cls, module: Any) -> "ImageModel | None":
        """None for a model without a vision encoder."""
        if not hasattr(module, "encode_images"):
            return None
        return cls(
            frozenset(module.image_token_ids),
            module.merge_size,
            module.patch_width,
            module.embedding_width,
            next(module.parameters()).dtype,
            getattr(module, "mrope", True),
        )

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def embeddings(self) -> tuple[int, torch.dtype]:
        """Width and dtype, as in ModelInputs."""
        return self.width, self.dtype
