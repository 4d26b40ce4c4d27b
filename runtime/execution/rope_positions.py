"""M-RoPE positions of a step's tokens (atomc.models.mrope), from the images of the requests in its
slots.
"""

from collections.abc import Sequence

import numpy as np

from atomc.models.mrope import mrope_positions
from atomc.runtime.execution.lora.rows import Array
from atomc.runtime.scheduling.step import Admission, Chunk


class RopePositions:
    """Positions [3, T]. Those of generated tokens are the index of the token and a constant."""

    def __init__(self, slots: int, merge_size: int) -> None:
        self.merge_size = merge_size
        self.deltas = np.zeros(slots + 1, np.int64)
        # For slots with images: the positions [3, n] of the prompt, until it is computed.
        self._of_prompts: dict[int, Array] = {}

    def positions(
        self, chunks: Sequence[Chunk], slots: Array, indices: Array, bounds: Array
    ) -> Array:
        """Of the tokens with these indices in their sequences; that of slots[i] has the rows
        bounds[i] to bounds[i + 1] - 1, and the first ones are those of the chunks.
        """
        for chunk in chunks:
            if chunk.admission is not None:
                self._admit(chunk.slot, chunk.admission)
        positions: Array = np.tile(indices + np.repeat(self.deltas[slots], np.diff(bounds)), (3, 1))
        if self._of_prompts:
            for chunk, row in zip(chunks, bounds.tolist(), strict=False):
                prompt_positions = self._of_prompts.get(chunk.slot)
                if prompt_positions is None:
                    continue
                part = prompt_positions[:, chunk.start : chunk.end]
                positions[:, row : row + part.shape[1]] = part
                if not part.size:  # generated tokens: an earlier step had the whole prompt
                    del self._of_prompts[chunk.slot]
        return positions

    def _admit(self, slot: int, request: Admission) -> None:
        self._of_prompts.pop(slot, None)
        self.deltas[slot] = 0
        if request.images:
            positions, delta = mrope_positions(request.images, request.num_prompt, self.merge_size)
            self._of_prompts[slot], self.deltas[slot] = positions.numpy(), delta
