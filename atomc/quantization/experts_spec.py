"""What the experts of a model compute: read from a module of ours or of transformers.

The gate of a class of transformers is found by comparing numbers, so that no class is named here.
E experts, H width of the model, I width of an expert.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atomc.models.experts import Experts
from atomc.ops.experts import ACTIVATIONS, Gate, gated
from atomc.torch_compat.core import outside_of_modes

SUPPORTED = (
    "supported are gated experts, gate and up one after the other or alternating, with "
    f"{', '.join(ACTIVATIONS)}"
)
# Attributes of classes of transformers, in order of precedence.
ALPHAS, LIMITS = ("alpha", "swiglu_alpha"), ("limit", "swiglu_limit")


@dataclass(frozen=True)
class ExpertsSpec:
    """The sizes of stacked experts, and what is between their products.

    transposed  weights are stored [E, H, 2I] and [E, I, H], not [E, 2I, H] and [E, H, I]
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_bias: bool
    transposed: bool
    gate: Gate


def is_experts(module: nn.Module) -> bool:
    """Whether the module has stacked weights of experts, gated or not, that are not quantized."""
    down = module._parameters.get("down_proj")
    return (
        _has_stacked_weights(module)
        and down is not None
        and down.dtype.is_floating_point
        and down.dtype.itemsize > 1
    )


def _has_stacked_weights(module: nn.Module) -> bool:
    return _is_stacked(module, "down_proj") and any(
        _is_stacked(module, name) for name in ("gate_up_proj", "up_proj")
    )


def _is_stacked(module: nn.Module, name: str) -> bool:
    weight = module._parameters.get(name)
    return weight is not None and weight.dim() == 3


def spec_of(module: nn.Module) -> ExpertsSpec:
    """Of experts whose weights have one element per code, quantized or not. Raises ValueError for
    experts that the ops of atomc cannot express.
    """
    name = type(module).__name__
    if not _has_stacked_weights(module):
        raise ValueError(f"{name} has no weights [E, N, K], but some in the layout of its kernels")
    if not _is_stacked(module, "gate_up_proj") or not getattr(module, "has_gate", True):
        raise ValueError(f"{name} has no gate; {SUPPORTED}")
    ours = isinstance(module, Experts)
    if not ours and not hasattr(module, "is_concatenated"):
        raise ValueError(
            f"{name} is not one of the classes whose experts transformers lets users replace"
        )
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(f"{name} has a norm after each expert; {SUPPORTED}")
    with outside_of_modes():
        gate = _gate_of_ours(module) if ours else _gate_of_transformers(module)
    transposed = bool(getattr(module, "is_transposed", False))
    down = module.get_parameter("down_proj")
    num_experts, hidden_size, width = (down.mT if transposed else down).shape
    return ExpertsSpec(
        num_experts,
        hidden_size,
        width,
        module._parameters.get("gate_up_proj_bias") is not None,
        transposed,
        gate,
    )


def _gate_of_ours(module: nn.Module) -> Gate:
    alpha, limit = _number(module, ALPHAS), _number(module, LIMITS)
    if alpha is None:
        return Gate(activation="silu", interleaved=False, alpha=1.702, limit=None)
    return Gate(activation="swiglu_oai", interleaved=True, alpha=alpha, limit=limit)


def _gate_of_transformers(module: nn.Module) -> Gate:
    """The gate that agrees with the method _apply_gate of this module on some numbers."""
    alpha, limit = _number(module, ALPHAS), _number(module, LIMITS)
    h = torch.linspace(-1, 1, 64 * 8, device="cpu", dtype=torch.float32) * (3 * (limit or 2))
    h = h[torch.randperm(len(h), generator=torch.Generator("cpu").manual_seed(0))].view(64, 8)
    result = _applied(module, h)
    for activation, interleaved, limited in product(ACTIVATIONS, (False, True), {None, limit}):
        gate = Gate(
            activation=activation,
            interleaved=interleaved,
            alpha=1.702 if alpha is None else alpha,
            limit=limited,
        )
        if torch.allclose(gated(h, **gate), result, rtol=1e-5, atol=1e-6):
            return gate
    activation = type(getattr(module, "act_fn", None)).__name__
    raise ValueError(
        f"the gate of {type(module).__name__} (activation {activation}) is another; {SUPPORTED}"
    )


@runtime_checkable
class _Gated(Protocol):
    def _apply_gate(self, gate_up_out: Tensor) -> Tensor: ...


def _applied(module: nn.Module, h: Tensor) -> Tensor:
    """_apply_gate of the module; NaN if it has none, or one with parameters."""
    activation = getattr(module, "act_fn", None)
    parameters = activation.parameters() if isinstance(activation, nn.Module) else ()
    if not isinstance(module, _Gated) or any(True for _ in parameters):
        return h.new_full((len(h), h.shape[1] // 2), math.nan)
    return module._apply_gate(h)


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    """The first of these attributes that is a number; None if there is none."""
    values = (getattr(module, name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, int | float)), None)
