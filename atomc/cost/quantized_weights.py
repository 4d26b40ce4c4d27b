"""The quantized weights of a graph's linears and experts, and the memory that they save."""

import math

from torch.fx import GraphModule

from atomc.graph.canonical import value
from atomc.graph.op_call import OpCall, op_call
from atomc.graph.provenance import layer_of, module_path
from atomc.ops.op import REGISTRY, Op
from atomc.report.records import QuantizedWeightSize


def quantized_weights(gm: GraphModule) -> list[QuantizedWeightSize]:
    """One for each op with a quantized weight, in the order of the graph before lowering."""
    return [
        _size_of(called)
        for called in filter(None, map(op_call, gm.graph.nodes))
        if called.op.quantized_weight
    ]


def _size_of(called: OpCall) -> QuantizedWeightSize:
    node, op, args = called.node, called.op, called.values
    weight = op.weight_of(args)
    assert weight is not None
    out = value(node)[0] if isinstance(value(node), tuple | list) else value(node)
    path = module_path(node)
    stored = [args[name] for name in weight.stored if args[name] is not None]
    codes = sum(math.prod(x.shape) for x in stored[: weight.weights])
    full = codes * weight.codes * out.element_size()
    return QuantizedWeightSize(
        op.name,
        f"{weight.format}, {weight.scales(args)}",
        path,
        layer_of(path),
        node.name,
        sum(math.prod(x.shape) * x.element_size() for x in stored),
        full,
        _unquantized(op),
    )


def _unquantized(op: Op) -> str:
    """The op of the same kind for weights that are not quantized."""
    others = (other for other in REGISTRY.values() if not other.quantized_weight)
    return next((other.name for other in others if other.kind == op.kind), "")
