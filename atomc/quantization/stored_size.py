"""The memory that a model takes once its layers are quantized, and while they are."""

import math

from torch import nn

from atomc.quantization.apply import Methods, groups, linear
from atomc.quantization.experts import STACKED, sizes, stacked
from atomc.quantization.experts_spec import spec_of
from atomc.quantization.layer_weights import Shapes


def stored_bytes(model: nn.Module, methods: Methods) -> int:
    """Bytes of the parameters of a model, on meta or not, after these methods quantized it."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for name, method in methods.linears.items():
        layer = linear(model, name)
        size = (layer.out_features, layer.in_features)
        total += _bytes(method.scheme.tensors(*size, layer.weight.dtype)) - layer.weight.nbytes
    for name, of_experts in methods.experts.items():
        experts = model.get_submodule(name)
        spec = spec_of(experts)
        for projection, size in sizes(spec).items():
            weight = experts.get_parameter(projection)
            tensors = of_experts.scheme.tensors(*size, weight.dtype)
            total += _bytes(stacked(projection, tensors, spec.num_experts)) - weight.nbytes
    return total


def unquantized_bytes(model: nn.Module, methods: Methods) -> int:
    """Bytes of the weights that are there unquantized at a time: of the layers of one input, or the
    experts of one layer.
    """
    linears = [
        sum(linear(model, name).weight.nbytes for name, _ in group)
        for group in groups(methods.linears)
    ]
    experts = [
        sum(model.get_submodule(name).get_parameter(projection).nbytes for projection in STACKED)
        for name in methods.experts
    ]
    return max([*linears, *experts], default=0)


def _bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
