"""Add LoRA adapters to linear layers, for a program that has room for them.

    x - linear(q | k | v) -> y    =>    x -+- linear(q | k | v) -+
                                           +---------------------+- lora_linear -> y

It runs after linear layers were merged, so that these merge and are quantized as without adapters:
merged layers get one op. A quantized layer's adapter reads the input before quantization. The
adapters are graph inputs, which the program owns.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.edit import add_input, infer
from atomc.graph.node_record import NodeRecord, record_of, step_node
from atomc.graph.op_call import quantizer_of
from atomc.graph.provenance import inherited, layer_of, module_path
from atomc.ops.inputs import GraphInput, LoraShape, LoraWeights, StepInput
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten


def lora(gm: GraphModule, context: Context) -> Outcome:
    """Add an op to each linear layer that the shape of the adapters names."""
    if context.lora is None:
        return Outcome()
    done = Outcome()
    sites = [
        (node, paths, x)
        for node in gm.graph.nodes
        if (paths := _paths(node, context.lora)) and (x := _input(node)) is not None
    ]
    if not sites:
        return done
    rows = _rows(gm.graph)
    for number, (node, paths, x) in enumerate(sites):
        done.fired.append(_add(node, paths, x, rows, number, context.lora))
    return done


def _paths(node: Node, shape: LoraShape) -> list[tuple[str, int]]:
    """The module path and the width of the layer of this node, or of each merged layer; [] if none
    of them is one that adapters may change.
    """
    op = op_of(node.target)
    if op is None or op.kind is not Kind.LINEAR or op.concat is None:
        return []
    layers = _merged(node) or [(module_path(node), int(value(node).shape[-1]))]
    if all(layer_of(path) is None for path, _ in layers):
        return []
    return layers if any(shape.changes(path) for path, _ in layers) else []


def _merged(node: Node) -> list[tuple[str, int]]:
    """The module path and the width of each of the merged layers of this node, without the columns
    of padding behind them; [] for a single layer.
    """
    split = next(iter(node.users), None)
    if (
        split is None
        or split.target is not aten.split_with_sizes.default
        or not record_of(split).made_by.startswith("merge_")
    ):
        return []
    parts = {int(str(part.args[1])): part for part in split.users}
    # A part that is not read has no node.
    names = [module_path(parts[i]) if i in parts else "" for i in range(max(parts) + 1)]
    widths = [int(part.shape[-1]) for part in value(split)]
    return list(zip(names, widths, strict=False))


def _input(node: Node) -> Node | None:
    """The input of a linear layer, before it was quantized; None if it is not in the graph."""
    x = node.args[0]
    assert isinstance(x, Node)
    if (quantizer := quantizer_of(x)) is not None:
        x = quantizer.args[0]
        assert isinstance(x, Node)
    return x if value(x).dtype == value(node).dtype else None


def _rows(graph: Graph) -> Node:
    """The graph input with the adapter of each row of the step."""
    ids = step_node(graph, "input_ids", "hidden")
    assert ids is not None
    tokens, device = value(ids).shape[0], value(ids).device
    rows = partial(torch.empty, tokens, dtype=torch.int32, device=device)
    return _graph_input(graph, StepInput("lora_rows"), rows)


def _graph_input(graph: Graph, runtime_input: GraphInput, make: Callable[[], Tensor]) -> Node:
    return add_input(graph, runtime_input.name, NodeRecord(input=runtime_input), make)


def _add(
    node: Node,
    paths: Sequence[tuple[str, int]],
    x: Node,
    rows: Node,
    number: int,
    shape: LoraShape,
) -> Fired:
    graph, fake = node.graph, value(x)
    names, widths = tuple(path for path, _ in paths), tuple(width for _, width in paths)
    sizes: dict[str, tuple[int, ...]] = {
        "lora_a": (shape.adapters, len(widths) * shape.rank, int(fake.shape[-1])),
        "lora_b": (shape.adapters, shape.rank, int(value(node).shape[-1])),
    }
    weights = [
        _graph_input(
            graph,
            LoraWeights(number, role, names, widths, size, fake.dtype),
            partial(fake.new_empty, size),
        )
        for role, size in sizes.items()
    ]
    with graph.inserting_after(node):
        adapted = graph.call_function(
            ops.lora_linear.overload, (node, x, *weights, rows, list(widths))
        )
    adapted.meta.update(inherited([node], node, "lora"))
    infer(adapted)
    node.replace_all_uses_with(adapted, delete_user_cb=lambda user: user is not adapted)
    return Fired("lora", node, {"rank": shape.rank, "layers": len(widths)}, set(), [adapted])
