"""Prepares images by the image processor of a model's folder, a class of transformers.

Always its PIL variant, so that the pixels do not depend on whether torchvision is installed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from atomc.files.json_types import JSONObject
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.requests.request import PromptImage

if TYPE_CHECKING:  # optional
    from PIL.Image import Image
    from tokenizers import Tokenizer

# One of them in a model folder has the settings of the image processor.
FILES = ("preprocessor_config.json", "processor_config.json")
PIXEL_BYTES = 4
CHANNELS = 3
INSTALL = "pip install 'atomc[images]'"
# Called with the tokens and bytes of an image before its patches are made; may raise.
Reserve: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class PlaceholderTokens:
    """image   the token of a prompt that stands for an image
    texts   of the tokens that stand for images and videos
    """

    image: int
    texts: tuple[str, ...]


class ImageProcessor:
    """The image processor of one model. Thread-safe.

    Raises ValueError if `processor` does not make patches of a fixed width with a grid.
    """

    def __init__(self, processor: Any) -> None:
        from PIL import Image

        self._processor = processor
        try:
            self.patch_width = CHANNELS * processor.temporal_patch_size * processor.patch_size**2
            self.prepare(Image.new("RGB", (8 * processor.patch_size, 6 * processor.patch_size)))
        except Exception as error:  # of any class of transformers, with any settings
            raise ValueError(
                f"the image processor {type(processor).__name__} does not make patches with a "
                f"grid: {type(error).__name__}: {error}"
            ) from error

    def num_patches(self, width: int, height: int) -> int:
        """The number of patches of an image of this size. Raises ImageError for a size that the
        model does not support.
        """
        try:
            return int(self._processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise ImageError(f"{width} x {height} pixels: {error}") from error

    def prepare(self, image: "Image", reserve: Reserve | None = None) -> PromptImage:
        """The image as patches, in no prompt yet. Raises ImageError, and what `reserve` raises."""
        num_patches = self.num_patches(*image.size)
        length = num_patches // self._processor.merge_size**2
        if reserve is not None:
            reserve(length, num_patches * self.patch_width * PIXEL_BYTES)
        outputs = self._processor(images=[image], return_tensors="np")
        patches = np.ascontiguousarray(outputs["pixel_values"], dtype=np.float32)
        ((temporal, vertical, horizontal),) = outputs["image_grid_thw"].tolist()
        grid = (temporal, vertical, horizontal)
        expected = (num_patches, self.patch_width)
        if patches.shape != expected or temporal * vertical * horizontal != num_patches:
            raise ValueError(f"patches of shape {patches.shape}, grid {grid}, expected {expected}")
        pixels = patches.tobytes()
        digest = hashlib.blake2b(repr(grid).encode(), digest_size=32)
        digest.update(pixels)
        return PromptImage(0, length, grid, pixels, digest.digest())


def image_tokens(
    folder: Path, config: JSONObject, tokenizer: "Tokenizer | None"
) -> PlaceholderTokens | str:
    """The tokens for images of a model with an image processor, or why the model reads no images.

    config   of config.json
    """
    image_token_id = config.get("image_token_id")
    if not isinstance(config.get("vision_config"), dict) or not isinstance(image_token_id, int):
        return f"{_architecture(config)} has no vision encoder"
    tokens = [config.get(name) for name in ("image_token_id", "video_token_id")]
    texts = [
        tokenizer and tokenizer.id_to_token(token) for token in tokens if isinstance(token, int)
    ]
    placeholders = tuple(text for text in texts if text)
    if not placeholders or texts[0] is None:
        return f"its tokenizer has no token {image_token_id}, the image token of config.json"
    if not any((folder / name).is_file() for name in FILES):
        return f"its folder has no {FILES[0]}"
    return PlaceholderTokens(image_token_id, placeholders)


def load_image_processor(folder: Path) -> ImageProcessor | str:
    """The image processor of a model's folder, or why it cannot be used."""
    try:
        import PIL  # noqa: F401

        # Up to 5.17, `from transformers import` asks for torchvision; PIL variants do without.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor
    except ImportError as error:
        return f"the library {error.name} is missing, {INSTALL}"
    try:
        processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
        return ImageProcessor(processor)
    except Exception as error:  # of any class of transformers, with any settings
        return f"its image processor cannot be loaded: {' '.join(str(error).split())}"


def _architecture(config: JSONObject) -> str:
    match config.get("architectures"):
        case [str(name), *_]:
            return name
    return str(config.get("model_type", "the model"))
