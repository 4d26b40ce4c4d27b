"""The LoRA adapters of the requests in the slots of a worker."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from atomc.runtime.scheduling.step import Chunk

Array = npt.NDArray[Any]

NONE = -1  # in ops.lora_linear


class LoraRows:
    """The number of each slot's adapter. A request's first chunk sets it."""

    def __init__(self, slots: int) -> None:
        self._of_slots = np.full(slots + 1, NONE, np.int32)

    def update(self, chunks: Sequence[Chunk]) -> bool:
        """Apply the admissions of a step; whether any of its rows has an adapter. Idempotent."""
        for chunk in chunks:
            if chunk.admission is not None:
                number = chunk.admission.lora
                self._of_slots[chunk.slot] = NONE if number is None else number
        return any(self._of_slots[chunk.slot] != NONE for chunk in chunks)

    def of_slots(self, slots: Array) -> Array:
        found: Array = self._of_slots[slots]
        return found
