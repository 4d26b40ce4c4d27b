"""An image in a prompt, prepared for a model's vision encoder."""

from dataclasses import dataclass


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

    @property
    def end(self) -> int:
        return self.start + self.length
