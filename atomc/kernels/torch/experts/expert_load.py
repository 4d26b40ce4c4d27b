"""Counts of the choices of experts, as torch calls that do not wait for the device."""

from torch import Tensor

from atomc import ops


@ops.count_experts.kernel("torch")
def count_experts(ids: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    return ops.count_experts.reference(ids, slots, counts)
