"""Copies per-row parameters to the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def pack_to_device(
    device: torch.device, rows: Sequence[Sequence[float]] | npt.NDArray[np.float64]
) -> Tensor:
    """[C, R, 1] f64 from R rows of C numbers, in one asynchronous copy. Integers below 2**53 are
    exact.
    """
    packed = torch.from_numpy(np.array(rows, dtype=np.float64).T.copy())[..., None]
    if device.type == "cuda":
        packed = packed.pin_memory()
    return packed.to(device, non_blocking=True)
