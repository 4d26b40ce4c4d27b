"""Which linears of a graph have a weight in few bits, and what that saves."""

import math
from typing import Any

from torch.fx import GraphModule, Node

from atomc.graph.canonical import value
from atomc.graph.provenance import layer_of, module_path
from atomc.op import op_of
from atomc.report import FewBits

# op -> (what the weight is in, inputs a column of its storage holds)
_WEIGHTS = {
    "scaled_linear_fp8": ("fp8", 1),
    "scaled_linear_fp8_block": ("fp8", 1),
    "scaled_linear_int8": ("int8", 1),
    "linear_w4a16": ("int4", 8),
    "linear_mxfp4": ("mxfp4", 2),
}


def few_bits(gm: GraphModule) -> list[FewBits]:
    """In the order of the graph, before lowering."""
    return [_of(node) for node in gm.graph.nodes if (op := op_of(node.target)) and op.name in _WEIGHTS]


def _of(node: Node) -> FewBits:
    op = op_of(node.target)
    assert op is not None
    bound = op.signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = {name: value(x) if isinstance(x, Node) else x for name, x in bound.arguments.items()}
    weight, (bits, packed) = given["weight"], _WEIGHTS[op.name]
    path = module_path(node)
    stored = [given[name] for name in ("weight", "weight_scale", "zeros") if given.get(name) is not None]
    full = math.prod(weight.shape) * packed * value(node).element_size()
    return FewBits(op.name, f"{bits}, {_scales(given)}", path, layer_of(path), node.name,
                   sum(math.prod(x.shape) * x.element_size() for x in stored), full)  # fmt: skip


def _scales(given: dict[str, Any]) -> str:
    """What shares a scale."""
    if "block" in given:
        return f"a scale a square of {given['block']}"
    if "group" in given:
        return f"a scale for {given['group']} inputs" + ("" if given["zeros"] is None else ", with zeros")
    scale, weight = given["weight_scale"], given["weight"]
    if scale.numel() == 1:
        return "one scale"
    return "a scale an output" if scale.numel() == weight.shape[0] else "a scale for 32 inputs"
