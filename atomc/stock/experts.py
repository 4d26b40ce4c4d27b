"""The experts of transformers through ops.moe_experts: "atom" of its ExpertsInterface."""

from typing import TypeGuard

import torch
from torch import Tensor, nn

from atomc import ops
from atomc.quantization.experts_spec import is_experts, spec_of
from atomc.torch_compat.core import CONSTANTS_OF_MODULES, constant_in_traces

# Whether weights are stored transposed; activation, interleaved, alpha and limit of the op.
Settings = tuple[bool, str, bool, float, float | None]


class StockExperts(nn.Module):
    """What the op reads of experts of transformers: their parameters, and the settings, if known.
    Some have biases.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    atom_settings: Settings


def register_experts() -> None:
    """Make `model.set_experts_implementation("atom")` of transformers run ops.moe_experts.

    A forward raises ValueError for experts that the op cannot express. Raises ImportError without
    transformers.
    """
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("atom", _experts)


def _is_experts(module: nn.Module) -> TypeGuard[StockExperts]:
    return hasattr(module, "is_concatenated")


def experts_of(model: nn.Module) -> list[StockExperts]:
    """The modules whose implementation transformers lets the user choose."""
    return [module for module in model.modules() if _is_experts(module)]


def read_settings(module: StockExperts) -> Settings:
    """How the op computes these experts, kept in the module. Raises ValueError if it cannot."""
    settings: Settings = _settings(module)
    module.atom_settings = settings
    return settings


@constant_in_traces
def _settings(module: nn.Module) -> Settings:
    """For Dynamo a constant, as its trace computes no numbers, guarded by the module's identity."""
    try:
        spec = spec_of(module)
    except ValueError as error:
        raise ValueError(f'experts implementation "atom": {error}') from error
    if not is_experts(module):
        name = type(module).__name__
        raise ValueError(f'experts implementation "atom": the weights of {name} are quantized')
    gate = spec.gate
    return spec.transposed, gate["activation"], gate["interleaved"], gate["alpha"], gate["limit"]


def _experts(
    module: StockExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts function of transformers: x [T, H], ids and weights [T, k] -> [T, H]."""
    settings: Settings | None = getattr(module, "atom_settings", None)
    if settings is None:  # a trace must not change the module
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and not CONSTANTS_OF_MODULES:  # without fullgraph, Dynamo runs this uncompiled
            raise RuntimeError(
                'experts implementation "atom": a trace of torch before 2.13 cannot read their '
                "settings; run the model once before it is compiled"
            )
        settings = _settings(module) if compiling else read_settings(module)
    transposed, activation, interleaved, alpha, limit = settings
    w13, w2 = module.gate_up_proj, module.down_proj
    if transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    return ops.moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        w13,
        w2,
        getattr(module, "gate_up_proj_bias", None),
        getattr(module, "down_proj_bias", None),
        activation=activation,
        interleaved=interleaved,
        alpha=alpha,
        limit=limit,
    )
