"""The LoRA adapters of the requests in the slots of a worker."""

from typing import Any

import numpy as np
import numpy.typing as npt

from atomc.runtime.scheduling.step import ScheduledStep

Array = npt.NDArray[Any]

NONE = -1  # in ops.lora_linear


class LoraRows:
    """The number of each slot's adapter. A request's first chunk sets it."""

    def __init__(self, slots: int) -> None:
        self._numbers = np.full(slots + 1, NONE, np.int32)

    def update(self, step: ScheduledStep) -> bool:
        """Apply the admissions of a step; whether any of its rows has an adapter. Idempotent."""
        for chunk in step.chunks:
            if chunk.admission is not None:
                number = chunk.admission.lora
                self._numbers[chunk.slot] = NONE if number is None else number
        slots = [*[chunk.slot for chunk in step.chunks], *step.decoding.slots]
        return bool((self._numbers[slots] != NONE).any())

    def adapters(self, slots: Array) -> Array:
        """The adapter's number of each of these slots; NONE for none."""
        numbers: Array = self._numbers[slots]
        return numbers
