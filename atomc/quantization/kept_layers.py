"""Layers of a model that are not quantized, whatever its rules say."""

from torch import nn

# Parts of a mixture of experts that choose experts, or weight the shared one.
ROUTERS = ("gate", "router", "shared_expert_gate")
# Projections of a gated delta net to the numbers of each head that its state decays and learns by.
DELTA_GATES = ("in_proj_ba", "in_proj_b", "in_proj_a", "b_proj", "a_proj")
# Vision encoders in models of transformers.
ENCODERS = ("visual", "vision_model", "vision_tower")
# The layer that peft wrapped, among the parts of its adapters.
WRAPPED = "base_layer"


def kept_layers(model: nn.Module, *, online: bool) -> set[str]:
    """The names of these modules. online: the weights are quantized here; a checkpoint says itself
    which of its layers are quantized, except for those of indexers.
    """
    indexers = _indexer_weights(model)
    if not online:
        return indexers
    return (
        indexers
        | _routers(model)
        | _delta_gates(model)
        | _vision_encoders(model)
        | _adapters(model)
    )


def unwrapped(name: str) -> str:
    """The name of a layer in a model without the adapters of peft."""
    return name.removeprefix("base_model.model.").removesuffix(f".{WRAPPED}")


def _indexer_weights(model: nn.Module) -> set[str]:
    """The names of the layers that weight the heads of an indexer (DeepSeek-V3.2): checkpoints in
    fp8 store them in floating point, and do not say so.
    """
    return {
        f"{name}.weights_proj"
        for name, block in model.named_modules()
        if {"wq_b", "wk", "weights_proj"} <= block._modules.keys()
    }


def _routers(model: nn.Module) -> set[str]:
    """The names of the modules that choose experts, and of all that they contain."""
    tops = [
        f"{name}.{part}".removeprefix(".")
        for name, block in model.named_modules()
        if "experts" in block._modules
        for part in ROUTERS
    ]
    return {
        f"{top}.{name}".removesuffix(".")
        for top in tops
        if (router := _child(model, top)) is not None
        for name, _ in router.named_modules()
    }


def _delta_gates(model: nn.Module) -> set[str]:
    """The names of DELTA_GATES. The convolution of a gated delta net is no linear layer."""
    return {
        f"{name}.{part}"
        for name, block in model.named_modules()
        if "A_log" in block._parameters
        for part in DELTA_GATES
    }


def _vision_encoders(model: nn.Module) -> set[str]:
    """The names of all modules in vision encoders."""
    return {
        name for name, _ in model.named_modules() if not set(ENCODERS).isdisjoint(name.split("."))
    }


def _adapters(model: nn.Module) -> set[str]:
    """The names of all modules of adapters of peft, whose products are thin and not merged."""
    return {
        f"{name}.{part}.{inner}".removesuffix(".")
        for name, wrapper in model.named_modules()
        if WRAPPED in wrapper._modules
        for part, adapter in wrapper.named_children()
        if part != WRAPPED
        for inner, _ in adapter.named_modules()
    }


def _child(model: nn.Module, name: str) -> nn.Module | None:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner)._modules.get(leaf)
