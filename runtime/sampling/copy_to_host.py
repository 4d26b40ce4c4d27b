"""Asynchronous copies from the device to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class HostCopier:
    """Copies results on its own stream, so that reading them does not wait for later steps."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, *tensors: Tensor) -> "HostCopy":
        if self.stream is None:
            return HostCopy(tensors, tensors, None)
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            pinned = [torch.empty_like(x, device="cpu", pin_memory=True) for x in tensors]
            copies = [to.copy_(x, non_blocking=True) for to, x in zip(pinned, tensors, strict=True)]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self.stream)
        return HostCopy(copies, tensors, arrived)


@dataclass(eq=False)
class HostCopy:
    """A copy in progress; keeps the sources alive until it is complete."""

    _copies: Sequence[Tensor]
    _sources: Sequence[Tensor]
    _arrived: torch.cuda.Event | None

    def wait(self) -> Sequence[Tensor]:
        """Wait for the copy; returns the tensors on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
