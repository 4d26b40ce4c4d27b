"""M-RoPE positions of a step's tokens (atomc.models.mrope), from the images of the requests in its
slots.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atomc.models.mrope import mrope_positions, num_image_tokens
from atomc.runtime.step import Chunk, Grid

Array = npt.NDArray[Any]


class RopePositions:
    """Positions [3, T]. Behind the images of a request, they are the index of the token and a
    number that is constant.
    """

    def __init__(self, slots: int, merge_size: int) -> None:
        self.merge_size = merge_size
        self.deltas = np.zeros(slots + 1, np.int64)
        # For slots with images: the positions [3, n] of all tokens up to the last image.
        self._of_images: dict[int, Array] = {}

    def positions(self, chunks: Sequence[Chunk], indices: Array, bounds: Array) -> Array:
        """Of the tokens with these indices in their sequences; chunk i has the rows bounds[i] to
        bounds[i + 1] - 1.
        """
        for chunk in chunks:
            if chunk.admission is not None:
                self._admit(chunk.slot, chunk.admission.images)
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        found: Array = np.tile(indices + np.repeat(self.deltas[slots], np.diff(bounds)), (3, 1))
        if self._of_images:
            for chunk, row in zip(chunks, bounds.tolist(), strict=False):
                known = self._of_images.get(chunk.slot)
                if known is not None and chunk.start < known.shape[1]:
                    part = known[:, chunk.start : chunk.end]
                    found[:, row : row + part.shape[1]] = part
        return found

    def _admit(self, slot: int, images: Sequence[tuple[int, Grid]]) -> None:
        self._of_images.pop(slot, None)
        self.deltas[slot] = 0
        if images:
            start, grid = images[-1]
            end = start + num_image_tokens(grid, self.merge_size)
            positions, delta = mrope_positions(images, end, self.merge_size)
            self._of_images[slot] = positions.numpy()
            self.deltas[slot] = delta
