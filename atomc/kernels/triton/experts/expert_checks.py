"""Why the Triton kernels for experts refuse a call, whatever the format of the weights."""

import torch
from torch import Tensor

from atomc.graph.sizes import known_equal
from atomc.kernels.checks import gapped, strided, unknown, unlike
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
    w13: Tensor,
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
    experts = w13.shape[0]
    if not isinstance(experts, int) or not 1 <= experts <= MOST_EXPERTS:
        return Refusal("shape", f"{experts} experts: written for 1 to {MOST_EXPERTS}")
    biases = {name: bias for name, bias in (("b13", b13), ("b2", b2)) if bias is not None}
    return strided(**biases)


def unreadable(x: Tensor, w13: Tensor, w2: Tensor) -> Refusal | None:
    """Refuse rows of x that are not contiguous, and weights [E, N, K] of dynamic size, or with
    neither rows nor columns contiguous.
    """
    if reason := strided(x=x):
        return reason
    for name, weight in (("w13", w13), ("w2", w2)):
        if not all(isinstance(size, int) for size in weight.shape):
            return Refusal("shape", f"the size of {name} is dynamic")
        if not any(known_equal(stride, 1) for stride in weight.stride()[1:]):
            return Refusal("layout", f"neither rows nor columns of {name} are contiguous")
    return None


def scattered(
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
) -> Refusal | None:
    """Refuse 4-bit weights, scales or zeros that are not contiguous."""
    return gapped(
        w13=w13,
        w2=w2,
        w13_scale=w13_scale,
        w2_scale=w2_scale,
        w13_zeros=w13_zeros,
        w2_zeros=w2_zeros,
    )
