"""Numerical error of tensors against reference tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx.node import Argument

from atomc.report.audit_findings import ErrorRow

# The error of a NaN or of another shape.
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Error:
    """max_abs: the largest difference; relative: max_abs / largest reference value; sqnr: signal to
    quantization noise ratio in decibels, None if nothing differs."""

    max_abs: float = 0.0
    relative: float = 0.0
    sqnr: float | None = None

    @property
    def rank(self) -> float:
        """Larger is worse."""
        return -math.inf if self.sqnr is None else -self.sqnr

    def row(self) -> ErrorRow:
        """As plain data of a report."""
        return {"max_abs": self.max_abs, "relative": self.relative, "sqnr": self.sqnr}


def error(found: Argument, expected: Argument) -> Error:
    """The error of one value, a tensor or a number; of any other type, it is equal or has the
    largest error.
    """
    if not (isinstance(found, Tensor | int | float) and isinstance(expected, Tensor | int | float)):
        return Error() if found == expected else Error(LARGEST, LARGEST, -LARGEST)
    a, b = (torch.as_tensor(x).detach() for x in (found, expected))
    if a.shape != b.shape:
        return Error(LARGEST, LARGEST, -LARGEST)
    if not a.numel() or (a.dtype == b.dtype and _equal(a, b)):
        return Error()
    a, b = _fp64(a), _fp64(b).to(a.device)
    same = (a == b) | (a.isnan() & b.isnan())
    differs = torch.where(same, 0.0, a - b).abs().nan_to_num(LARGEST, LARGEST).clamp(max=LARGEST)
    signal = torch.where(b.isfinite(), b, 0.0)
    most, largest = float(differs.max()), float(signal.abs().max())
    if not most:
        return Error()
    power = float(signal.square().sum()), float(differs.square().sum())
    sqnr = 10 * math.log10(power[0] / power[1]) if power[0] and power[0] / power[1] else -LARGEST
    return Error(most, most / largest if largest else LARGEST, sqnr)


def worst(found: Sequence[Argument], expected: Sequence[Argument]) -> Error:
    """The largest error of several values."""
    if len(found) != len(expected):
        return Error(LARGEST, LARGEST, -LARGEST)
    errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
    return max(errors, key=lambda e: e.rank, default=Error())


def _equal(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.dtype.itemsize in bits and not a.dtype.is_complex and a.dtype != torch.bool:
        a, b = (x.contiguous().view(bits[x.dtype.itemsize]) for x in (a, b))
    return torch.equal(a, b.to(a.device))


def _fp64(x: Tensor) -> Tensor:
    """As fp64; 8-bit dtypes are converted via fp32."""
    return (x.to(torch.float32) if x.dtype.itemsize == 1 else x).to(torch.float64)
