"""Gives a model on meta random weights, for load_format "dummy"."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from atomc.loading.limits import check_memory
from atomc.parallel.division import Division
from atomc.parallel.sharding import Sharding, cut_parameters
from atomc.parallel.stages import OwnNames
from atomc.quantization import apply
from atomc.quantization.apply import Methods
from atomc.quantization.stored_size import stored_bytes, unquantized_bytes
from atomc.weights.parameters import allocate_buffers, fill_randomly, parameter_names

Parameters = list[tuple[str, ...]]  # the names of each


def load_dummy(
    model: nn.Module,
    methods: Methods,
    device: torch.device | str,
    division: Division,
    stage_names: OwnNames,
) -> None:
    """Give a model on meta random weights, quantized by these methods: those of one input, or the
    experts of a layer, before the next are made. A rank then keeps its parts of them.

    Raises ValueError if the weights of this rank exceed the free memory.
    """
    sharding = division.shard(model, methods.linears)
    ranks = 1 if sharding is None else sharding.place.size
    wanted = stored_bytes(model, methods) + unquantized_bytes(model, methods)
    check_memory(wanted // ranks, type(model).__name__, device)
    allocate_buffers(model, device)
    others = _fill_and_quantize(model, methods, device, sharding, stage_names)
    cuts = {} if sharding is None else sharding.cuts()
    for names in others:
        fill_randomly(model, device, [names], stage_names.in_whole)
        cut_parameters(model, cuts, [names])
    if sharding is not None:
        sharding.resize()
        sharding.connect()


def _fill_and_quantize(
    model: nn.Module,
    methods: Methods,
    device: torch.device | str,
    sharding: Sharding | None,
    stage_names: OwnNames,
) -> Parameters:
    """Fill and quantize the layers of these methods; the names of the parameters that are left."""

    def keep(layers: Sequence[str]) -> None:
        if sharding is not None:
            cut_parameters(model, sharding.cuts(layers))

    parameters = parameter_names(model)
    for name, method in methods.experts.items():
        of_experts, parameters = _split(parameters, [name])
        fill_randomly(model, device, of_experts, stage_names.in_whole)
        apply.quantize_experts(model, name, method)
        keep([name])
    for group in apply.groups(methods.linears):
        layers = [name for name, _ in group]
        of_group, parameters = _split(parameters, layers)
        fill_randomly(model, device, of_group, stage_names.in_whole)
        apply.quantize_layers(model, layers, methods.linears)
        keep(layers)
    return parameters


def _split(parameters: Parameters, layers: Iterable[str]) -> tuple[Parameters, Parameters]:
    """(the parameters of these layers, all others)."""
    inside = tuple(f"{layer}." for layer in layers)
    of_layers = [names for names in parameters if names[0].startswith(inside)]
    return of_layers, [names for names in parameters if names not in of_layers]
