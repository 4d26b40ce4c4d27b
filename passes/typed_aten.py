"""ATen ops that replacements call, with their types."""

from collections.abc import Callable

import torch
from torch import Tensor

_aten = torch.ops.aten
transpose: Callable[[Tensor, int, int], Tensor] = _aten.transpose.int
to_copy: Callable[..., Tensor] = _aten._to_copy.default
