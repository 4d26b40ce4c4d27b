"""Why the Triton kernels for experts refuse a call, whatever the format of the weights."""

import torch
from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.kernels.checks import strided, unknown, unlike
from atomc.kernels.triton.experts.expert_sort import MOST_EXPERTS
from atomc.kernels.triton.launch.launch import not_nvidia
from atomc.ops.experts import ACTIVATIONS
from atomc.ops.formats import FLOATS
from atomc.ops.op import Refusal
from atomc.platform import Platform


def unfit(
    platform: Platform,
    ids: Tensor,
    weights: Tensor,
    num_experts: int | torch.SymInt,
    b13: Tensor | None,
    b2: Tensor | None,
    activation: str,
) -> Refusal | None:
    """Refuse what no kernel for many tokens takes, whatever the format of the weights."""
    if reason := (
        not_nvidia(platform)
        or unlike((torch.int32, torch.int64), ids=ids)
        or unlike(FLOATS, weights=weights)
        or unlike(FLOATS, b13=b13)
        or unlike(FLOATS, b2=b2)
        or unknown(ACTIVATIONS, activation=activation)
    ):
        return reason
    if not isinstance(num_experts, int) or not 1 <= num_experts <= MOST_EXPERTS:
        return Refusal("shape", f"{num_experts} experts: written for 1 to {MOST_EXPERTS}")
    biases = {name: bias for name, bias in (("b13", b13), ("b2", b2)) if bias is not None}
    return strided(**biases)


def unreadable(**weights: Tensor) -> Refusal | None:
    """Refuse weights [E, N, K] of dynamic size, or with neither rows nor columns contiguous."""
    for name, weight in weights.items():
        if not all(isinstance(size, int) for size in weight.shape):
            return Refusal("shape", f"the size of {name} is dynamic")
        if not any(known_equal(stride, 1) for stride in weight.stride()[1:]):
            return Refusal("layout", f"neither rows nor columns of {name} are contiguous")
    return None


def scattered(**tensors: Tensor | None) -> Refusal | None:
    """Refuse tensors [E, N, K] that are not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not (
            known_equal(tensor.stride(2), 1)
            and known_equal(tensor.stride(1), tensor.shape[2])
            and known_equal(tensor.stride(0), tensor.shape[1] * tensor.shape[2])
        ):
            return Refusal("layout", f"{name} is not contiguous")
    return None
