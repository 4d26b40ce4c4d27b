"""Which images a model takes, and how many of them an executor holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from atomc.models.image_grid import num_image_tokens
from atomc.runtime.requests.request import PromptImage

FLOAT_BYTES = 4


@dataclass(frozen=True)
class ImageLimits:
    """What the engine must know of a model with a vision encoder. msgspec can encode it.

    token_ids        the model's tokens for images
    merge_size       a token stands for merge_size x merge_size patches
    patch_width      values of a patch
    bytes_per_token  of the embeddings of an image
    cache_bytes      for the embeddings of all images that the executor holds
    max_patches      of the images that a step encodes, and so of one image
    """

    token_ids: frozenset[int]
    merge_size: int
    patch_width: int
    bytes_per_token: int
    cache_bytes: int
    max_patches: int

    @property
    def cache_tokens(self) -> int:
        return self.cache_bytes // self.bytes_per_token

    def example(self) -> PromptImage | None:
        """An image of one color in 2 x 2 tokens, to run the encoder once; None if it exceeds the
        limits.
        """
        side = 2 * self.merge_size
        pixels = bytes(FLOAT_BYTES * self.patch_width * side * side)
        image = PromptImage(0, 4, (1, side, side), pixels, b"an example")
        return None if self._why_too_large(image) else image

    def refuse(self, images: Sequence[PromptImage], prompt: Sequence[int]) -> None:
        """Raise ValueError for images that are not in order, do not fit the prompt or cannot be
        encoded.
        """
        end = 0
        for number, image in enumerate(images):
            why = self._why_not(image, prompt, end)
            if why:
                raise ValueError(f"image {number} of {len(images)}: {why}")
            end = image.end

    def _why_not(self, image: PromptImage, prompt: Sequence[int], first: int) -> str:
        """Why the image is refused; "" if it is not. first: end of the image before it."""
        t, h, w = image.grid
        merge = self.merge_size
        if min(image.grid) < 1 or h % merge or w % merge:
            return (
                f"its grid is {t} x {h} x {w} patches, expected positive numbers, of which the "
                f"last two are divisible by {merge}"
            )
        length = num_image_tokens(image.grid, merge)
        if image.length != length:
            return (
                f"it has {image.length} tokens, expected {length} for {t} x {h} x {w} patches in "
                f"squares of {merge} x {merge}"
            )
        if not first <= image.start <= image.end <= len(prompt):
            return (
                f"it has the tokens {image.start} to {image.end - 1}, expected some of {first} to "
                f"{len(prompt) - 1}: images are in order, do not overlap, and end inside the prompt"
            )
        others = set(prompt[image.start : image.end]) - self.token_ids
        if others:
            return (
                f"token {min(others)} is among its tokens in the prompt, expected the model's "
                f"image token ({', '.join(map(str, sorted(self.token_ids)))})"
            )
        return self._why_too_large(image)

    def _why_too_large(self, image: PromptImage) -> str:
        expected = FLOAT_BYTES * self.patch_width * image.num_patches
        if len(image.pixels) != expected:
            return (
                f"it has {len(image.pixels)} bytes of pixels, expected {expected}: "
                f"{image.num_patches} patches of {self.patch_width} values in fp32"
            )
        if image.num_patches > self.max_patches:
            return (
                f"it has {image.num_patches} patches, at most {self.max_patches} are encoded in a "
                "step; make it smaller, or raise max_image_patches"
            )
        if image.length > self.cache_tokens:
            return (
                f"its embeddings take {image.length * self.bytes_per_token} bytes, the cache of "
                f"embeddings has {self.cache_bytes}; make it smaller, or raise image_cache_bytes"
            )
        return ""
