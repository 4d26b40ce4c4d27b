"""Lower every op to a provider's kernel, or to its reference, which Inductor fuses with other ops.

The lowered node calls the Python function directly: a dump shows what runs, and a call costs 0.1
us. Further arguments of kernels (prepared weights, a plan, a workspace, what several calls share)
are added here.
"""

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.canonical import value
from atomc.graph.edit import add_input
from atomc.graph.node_record import NodeRecord, record_of, set_record
from atomc.graph.op_call import OpCall, op_call
from atomc.ops.by_name import call_by_name
from atomc.ops.op import Attribute, Extra, Kernel
from atomc.ops.op_traits import Kind
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired


def lower(gm: GraphModule, context: Context) -> Outcome:
    """Replace the target of each op node by the function that `context.choose` selects. Returns the
    added inputs.
    """
    assert context.choose is not None
    fired = []
    extras: dict[Hashable, Node] = {}
    shared: dict[Hashable, Node] = {}
    for node in list(gm.graph.nodes):
        called = op_call(node)
        if called is None:
            continue
        kernel = context.choose(node)
        if kernel is None:
            node.target = called.op.reference
        else:
            _call_kernel(called, kernel, extras, shared)
        provider = "" if kernel is None else kernel.provider
        set_record(node, replace(record_of(node), op=called.op.name, kernel=provider))
        fired.append(Fired("lower", node, {"op": called.op.name}))
    records = map(record_of, extras.values())
    return Outcome(fired, extras=[record.extra for record in records if record.extra is not None])


def _call_kernel(
    called: OpCall, kernel: Kernel, extras: dict[Hashable, Node], shared: dict[Hashable, Node]
) -> None:
    node, op, graph = called.node, called.op, called.node.graph
    arguments = op.signature.bind(*node.args, **node.kwargs).arguments
    attributes = tuple((name, _plain(called.arguments[name])) for name in kernel.attributes)
    added: dict[str, Node] = {}

    def extra_input(key: Hashable, extra: Extra) -> Node:
        """The graph input of an extra, which calls with an equal key share."""
        if key not in extras:
            extras[key] = add_input(graph, f"{extra.kind}_{len(extras)}", NodeRecord())
            named = replace(extra, name=extras[key].name)
            set_record(extras[key], NodeRecord(extra=named))
        return extras[key]

    for names, prepare in kernel.prepares.items():
        weights = [arguments.get(name) for name in names]
        if weights[0] is None:
            continue
        extra = Extra(
            "prepared",
            "",
            prepare,
            tuple(weight.name if weight is not None else None for weight in weights),
            attributes,
            _bytes_of_results(node) if Kind.WEIGHT in op.kind else None,
            kernel.keeps_original,
        )
        added[names[0]] = extra_input((*weights, prepare, attributes), extra)
    if kernel.plan is not None:
        added["plan"] = extra_input(kernel.plan, Extra("plan", "", kernel.plan))
    with graph.inserting_before(node):
        if kernel.workspace is not None:
            size = graph.call_function(kernel.workspace, node.args, dict(node.kwargs))
            device = value(next(iter(node.all_input_nodes))).device
            added["workspace"] = graph.call_function(
                torch.empty, (size,), {"dtype": torch.uint8, "device": device}
            )
            for part in (size, added["workspace"]):
                set_record(part, NodeRecord(kernel=kernel.provider))
        if kernel.shared is not None:
            constants = call_by_name(kernel.shared.constants, **called.values)
            operands = (*map(arguments.get, kernel.shared.inputs), *constants)
            key = (kernel.shared.function, *operands)
            if key not in shared:
                shared[key] = graph.call_function(kernel.shared.function, operands)
                set_record(shared[key], NodeRecord(kernel=kernel.provider))
            added["shared"] = shared[key]
    node.target = kernel.function
    if added:
        node.args, node.kwargs = (), {**arguments, **added}


def _plain(attribute: Argument) -> Attribute:
    assert attribute is None or isinstance(attribute, int | str | torch.dtype)
    return attribute


def _bytes_of_results(node: Node) -> int:
    fake = value(node)
    results = [fake] if isinstance(fake, torch.Tensor) else fake
    return sum(int(each.nbytes) for each in results)
