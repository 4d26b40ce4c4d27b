"""Types of what a compiled graph takes and returns."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Input = Tensor | torch.SymInt | int | float
Output = Tensor | torch.SymInt | int | float | None
Outputs = Output | Sequence["Outputs"]
Call = Callable[..., Outputs]
