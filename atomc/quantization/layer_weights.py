"""The tensors of a scheme by name."""

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
