"""The experts of transformers' classes through ops.moe_experts: implementation "atom" of its
ExpertsInterface.
"""

from typing import TypeGuard

from torch import Tensor, nn

from atomc import ops

# The activations of transformers that the op has, by class.
ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}
# The class whose method _apply_gate is swiglu_oai over alternating columns; most classes have
# transformers' own, act_fn(first half) * second half.
GPT_OSS, DEFAULT_GATE = "GptOssExperts", "_default_apply_gate"


def register_experts() -> None:
    """Make `model.set_experts_implementation("atom")` of transformers run ops.moe_experts.

    A forward raises ValueError for experts that the op cannot express. Raises ImportError without
    transformers.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("atom", _experts)


class StockExperts(nn.Module):
    """What transformers adds to a class of experts whose implementation the user can choose, and
    the parameters of the class. Biases, alpha and limit only exist in some.
    """

    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    is_concatenated: bool
    gate_up_proj: Tensor
    gate_up_proj_bias: Tensor
    down_proj: Tensor
    down_proj_bias: Tensor
    alpha: float
    limit: float


def _is_experts(module: nn.Module) -> TypeGuard[StockExperts]:
    return hasattr(module, "is_concatenated") and hasattr(module, "has_gate")


def experts_of(model: nn.Module) -> list[StockExperts]:
    """The modules whose implementation transformers lets the user choose."""
    return [module for module in model.modules() if _is_experts(module)]


def refusal(module: StockExperts) -> str:
    """Why the op cannot express these experts; "" if it can."""
    name = type(module).__name__
    if not module.has_gate:
        return f"{name} has no gate, only gated experts are supported"
    if module.has_post_expert_norm:
        return f"{name} has a norm after each expert, which is not supported"
    if name == GPT_OSS:
        return ""
    if _name_of_gate(module) != DEFAULT_GATE:
        return f"{name} has a gate of its own (_apply_gate), which is not supported"
    activation = type(module.act_fn).__name__
    if activation not in ACTIVATIONS:
        return f"{name} has activation {activation}, only {', '.join(ACTIVATIONS)} are supported"
    return ""


def _name_of_gate(module: StockExperts) -> str:
    return str(type(module)._apply_gate.__name__)  # type: ignore[attr-defined]


def _experts(
    module: StockExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts function of transformers: x [T, H], ids and weights [T, k] -> [T, H]."""
    if reason := refusal(module):
        raise ValueError(f'experts implementation "atom": {reason}')
    w13, w2 = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    b13, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    args = (hidden_states, top_k_index, top_k_weights, w13, w2, b13, b2)
    if type(module).__name__ != GPT_OSS:
        return ops.moe_experts(*args, activation=ACTIVATIONS[type(module.act_fn).__name__])
    alpha, limit = module.alpha, module.limit
    return ops.moe_experts(
        *args, activation="swiglu_oai", interleaved=True, alpha=alpha, limit=limit
    )
