"""Which images' embeddings an executor holds. The scheduler decides it, and its steps say what to
encode and what to drop.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from atomc.runtime.requests.request import PromptImage, Request, overlapping
from atomc.runtime.scheduling.image_limits import ImageLimits
from atomc.runtime.scheduling.step import ImagePixels


class ImageCache:
    """The embeddings by image digest, least recently used first, with their number of tokens.

    For each step: `begin`, `take_rows` for each request with images, `end`.

    limits   None: the model takes no images
    """

    def __init__(self, limits: ImageLimits | None) -> None:
        self.num_tokens = 0 if limits is None else limits.cache_tokens
        self.max_patches = 0 if limits is None else limits.max_patches
        self.held: OrderedDict[bytes, int] = OrderedDict()
        self._free = self.num_tokens
        self._patches = 0  # that the step may still encode
        self._kept: set[bytes] = set()
        self._encoded: dict[bytes, ImagePixels] = {}
        self._dropped: set[bytes] = set()

    def begin(self, kept: Iterable[bytes]) -> None:
        """Begin a step. kept: images that running requests have computed in part, which stay."""
        for digest in list(self._encoded):  # of a step that was not scheduled
            self.forget(digest)
        self._kept = set(kept) if self.held else set()
        self._patches = self.max_patches

    def take_rows(self, request: Request, count: int) -> tuple[int, int]:
        """How many of the next `count` tokens of a running request can be computed: those before
        the first image that `take` refuses. And how many of their images were held.
        """
        start, num_held = request.computed, 0
        for image in overlapping(request.images, start, start + count):
            held = image.digest in self.held
            if not self.take(image):
                return max(image.start - start, 0), num_held
            num_held += held and start <= image.start
        return count, num_held

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

    def can_compute(self, request: Request, position: int) -> bool:
        """Whether the image to which the token at this position belongs, if any, can be taken."""
        images = overlapping(request.images, position, position + 1)
        return all(self.can_take(image) for image in images)

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


def computed_in_part(running: Iterable[Request]) -> Iterator[bytes]:
    """Images of whose tokens some are computed and some not."""
    for request in running:
        if request.images:
            for image in overlapping(request.images, request.computed, request.computed + 1):
                if image.start < request.computed:
                    yield image.digest
