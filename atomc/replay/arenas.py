"""Memory for the temporaries of a repeated call on the CPU, which stays for later calls."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Larger ones are freed after each call: its kernels take longer than an allocation.
KEPT_BYTES = 2**22


class View(NamedTuple):
    """A tensor in an arena. offset: in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Arenas:
    """Arenas of this many bytes with the same views, as many as calls run at one time.

    Between calls one of them stays.
    """

    def __init__(self, size: int, views: Sequence[View]):
        self.size, self.views = size, views
        self.free: list[list[Tensor]] = []

    def take(self) -> list[Tensor]:
        """The views of an arena that no other call uses."""
        try:
            return self.free.pop()
        except IndexError:
            return self._allocate()

    def give(self, arena: list[Tensor]) -> None:
        """Return what `take` has returned."""
        if not self.free and self.size <= KEPT_BYTES:
            self.free.append(arena)

    def _allocate(self) -> list[Tensor]:
        # Calls inside and outside of inference mode may write it.
        with torch.inference_mode(False), torch.no_grad():
            memory = torch.empty(self.size, dtype=torch.uint8, device="cpu").untyped_storage()
            return [
                torch.empty(0, dtype=view.dtype, device="cpu").set_(
                    memory, view.offset // view.dtype.itemsize, view.shape, view.stride
                )
                for view in self.views
            ]
