"""Which images' embeddings an executor holds. The scheduler decides it, and its steps say what to
encode and what to drop.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from atomc.runtime.image_limits import ImageLimits
from atomc.runtime.prompt_image import PromptImage
from atomc.runtime.step import ImagePixels


class ImageCache:
    """The embeddings by image digest, least recently used first, with their number of tokens.

    For each step: `begin`, `take` for each image with tokens in it, `end`.
    """

    def __init__(self, limits: ImageLimits) -> None:
        self.num_tokens = limits.cache_tokens
        self.max_patches = limits.max_patches
        self.held: OrderedDict[bytes, int] = OrderedDict()
        self._free = limits.cache_tokens
        self._patches = 0  # that the step may still encode
        self._kept: set[bytes] = set()
        self._encoded: dict[bytes, ImagePixels] = {}
        self._dropped: set[bytes] = set()

    def begin(self, kept: Iterable[bytes]) -> None:
        """Begin a step. kept: images that running requests have computed in part, which stay."""
        for digest in list(self._encoded):  # of a step that was not scheduled
            self.forget(digest)
        self._kept, self._patches = set(kept), self.max_patches

    def take(self, image: PromptImage) -> bool:
        """Whether the step has the image's embeddings: they are held, or it encodes them. False if
        it encodes enough already, or all embeddings that are held are needed.
        """
        digest = image.digest
        if not self.can_take(image):
            return False
        if digest not in self.held:
            self._make_room(image.length)
            self.held[digest] = image.length
            self._free -= image.length
            self._patches -= image.num_patches
            self._encoded[digest] = ImagePixels(digest, image.length, image.grid, image.pixels)
        self.held.move_to_end(digest)
        self._kept.add(digest)
        return True

    def can_take(self, image: PromptImage) -> bool:
        """Whether `take` returns True; without changes."""
        if image.digest in self.held:
            return True
        unused = sum(size for digest, size in self.held.items() if digest not in self._kept)
        return image.num_patches <= self._patches and image.length <= self._free + unused

    def end(self) -> tuple[tuple[ImagePixels, ...], tuple[bytes, ...]]:
        """The images that the step encodes, and the embeddings that are dropped before. Not called
        for a step without chunks, which is not scheduled.
        """
        encoded, dropped = tuple(self._encoded.values()), tuple(sorted(self._dropped))
        self._encoded.clear()
        self._dropped.clear()
        return encoded, dropped

    def undo(self, encoded: Sequence[ImagePixels], dropped: Sequence[bytes]) -> None:
        """Undo the last step, which may or may not have encoded and dropped these."""
        self._dropped.update(dropped)
        for image in encoded:
            self.forget(image.digest)

    def forget(self, digest: bytes) -> None:
        """Drop the embeddings of this image, if they are held."""
        length = self.held.pop(digest, None)
        if length is not None:
            self._free += length
            self._encoded.pop(digest, None)
            self._dropped.add(digest)

    def clear(self) -> None:
        for digest in list(self.held):
            self.forget(digest)

    def check(self) -> None:
        """Assert that the sizes agree."""
        assert self._free == self.num_tokens - sum(self.held.values()), "tokens are lost"
        assert self._free >= 0, "more embeddings than the cache has room for"
        assert self._encoded.keys() <= self.held.keys(), "an image is encoded and not held"

    def _make_room(self, length: int) -> None:
        """Drop embeddings that are not needed until `length` tokens fit."""
        for digest in [digest for digest in self.held if digest not in self._kept]:
            if length <= self._free:
                return
            self.forget(digest)
