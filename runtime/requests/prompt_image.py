"""An image in a prompt, prepared for a model's vision encoder."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod


@dataclass(frozen=True)
class PromptImage:
    """An image, or one temporal patch of a video. msgspec can encode it.

    start    position of its first token in the prompt; these tokens are the model's image token
    length   number of its tokens
    grid     number of patches: temporal, vertical, horizontal
    pixels   the patches as transformers' processor orders them, fp32 [patches, values], row-major
    digest   hash of grid and pixels: images with equal digests have equal embeddings
    """

    start: int
    length: int
    grid: tuple[int, int, int]
    pixels: bytes
    digest: bytes

    def salted(self, salt: str | None) -> "PromptImage":
        """The image with another digest for each salt, so that only requests with the same salt
        share its pixels and embeddings.
        """
        if salt is None:
            return self
        digest = blake2b(self.digest + salt.encode(), digest_size=len(self.digest)).digest()
        return replace(self, digest=digest)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_patches(self) -> int:
        return prod(self.grid)


def overlapping(images: Sequence[PromptImage], start: int, end: int) -> Sequence[PromptImage]:
    """The images of a prompt with tokens at positions start to end - 1."""
    first = bisect_right(images, start, key=lambda image: image.end)
    last = bisect_left(images, end, key=lambda image: image.start)
    return images[first:last]
