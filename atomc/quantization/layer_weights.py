"""The tensors that a scheme reads from a layer, as protocols."""

from typing import Protocol

from torch import Tensor

from atomc.ops.experts import Gate


class QuantizedWeight(Protocol):
    """The tensors of a quantized weight; those that its scheme lacks are not set."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def weight_scale(self) -> Tensor: ...
    @property
    def zeros(self) -> Tensor: ...


class LinearWeights(QuantizedWeight, Protocol):
    """The parameters of a quantized linear layer; those that its scheme lacks are not set."""

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
    def gate_up_proj(self) -> Tensor: ...
    @property
    def gate_up_proj_scale(self) -> Tensor: ...
    @property
    def gate_up_proj_zeros(self) -> Tensor: ...
    @property
    def gate_up_proj_input_scale(self) -> Tensor: ...
    @property
    def gate_up_proj_bias(self) -> Tensor | None: ...
    @property
    def down_proj(self) -> Tensor: ...
    @property
    def down_proj_scale(self) -> Tensor: ...
    @property
    def down_proj_zeros(self) -> Tensor: ...
    @property
    def down_proj_input_scale(self) -> Tensor: ...
    @property
    def down_proj_bias(self) -> Tensor | None: ...
