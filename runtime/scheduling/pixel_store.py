"""The pixels of the requests of an engine: equal images are held once, their size is limited."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atomc.runtime.requests.request import PromptImage


@dataclass
class _Held:
    pixels: bytes
    count: int = 0


class PixelStore:
    """Pixels by image digest, with the number of images in requests that have them.

    A request has its pixels until it ends, because a preempted one may encode them again.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._held: dict[bytes, _Held] = {}

    def has_room(self, images: Sequence[PromptImage]) -> bool:
        """Whether the images can be added. Without any other, they always can."""
        missing = {image.digest: len(image.pixels) for image in images} if images else {}
        size = sum(size for digest, size in missing.items() if digest not in self._held)
        return not self.num_bytes or self.num_bytes + size <= self.limit

    def add(self, images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
        """The same images; those with a known digest share its pixels."""
        shared = []
        for image in images:
            held = self._held.get(image.digest)
            if held is None:
                held = self._held[image.digest] = _Held(image.pixels)
                self.num_bytes += len(image.pixels)
            held.count += 1
            shared.append(replace(image, pixels=held.pixels))
        return tuple(shared)

    def remove(self, images: Sequence[PromptImage]) -> None:
        """Remove images that were added."""
        for image in images:
            held = self._held[image.digest]
            held.count -= 1
            if not held.count:
                del self._held[image.digest]
                self.num_bytes -= len(held.pixels)

    def check(self, images: Sequence[PromptImage]) -> None:
        """Assert that it holds the pixels of these images, and no others."""
        counts = {digest: held.count for digest, held in self._held.items()}
        for image in images:
            counts[image.digest] = counts.get(image.digest, 0) - 1
        assert not any(counts.values()), "pixels of an image are lost or kept"
        assert self.num_bytes == sum(len(held.pixels) for held in self._held.values()), (
            "the size of the pixels is wrong"
        )
