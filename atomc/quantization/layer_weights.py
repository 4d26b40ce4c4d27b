"""The tensors of a scheme by name, and as protocols those that it reads from a layer."""

from typing import Protocol

import torch
from torch import Tensor

from atomc.ops.experts import Gate

Tensors = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class LinearWeights(Protocol):
    """The parameters of a quantized linear layer; those that its scheme lacks are not set."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def weight_scale(self) -> Tensor: ...
    @property
    def zeros(self) -> Tensor: ...
    @property
    def global_scale(self) -> Tensor: ...
    @property
    def input_scale(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


class ExpertsWeights(Protocol):
    """The parameters of quantized experts, each [E, ...] of the scheme's tensors; those that the
    scheme lacks are not set. The input scales are [1].
    """

    @property
    def gate(self) -> Gate: ...
    @property
    def codes_and_scales(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of gate_up_proj, and of down_proj."""

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]: ...
    @property
    def gate_up_proj(self) -> Tensor: ...
    @property
    def gate_up_proj_zeros(self) -> Tensor: ...
    @property
    def gate_up_proj_input_scale(self) -> Tensor: ...
    @property
    def down_proj_zeros(self) -> Tensor: ...
    @property
    def down_proj_input_scale(self) -> Tensor: ...
