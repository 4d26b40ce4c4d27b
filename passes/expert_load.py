"""Count how many tokens each expert gets, if the option expert_load is set.

    moe_experts(x, ids, ...)    =>    moe_experts(x, ids, ...)
                                      count_experts(ids, slots, counts!)

The counts of a layer become a graph input, which the program owns. A process that sends tokens to
the experts of others counts what it sends: ids [T, k] of its own tokens, of all experts.
"""

from functools import partial

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import value
from atomc.graph.edit import add_input, insert
from atomc.graph.node_record import NodeRecord, record_of, step_node
from atomc.graph.op_call import arguments_of, kind_of
from atomc.graph.provenance import module_path
from atomc.ops.inputs import ExpertCounts
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired


def expert_load(gm: GraphModule, context: Context) -> Outcome:
    """Count the ids of each op of experts."""
    if not context.options.expert_load:
        return Outcome()
    slots = step_node(gm.graph, "slots")
    if slots is None:
        return Outcome(notes=["expert_load: no layer has state per token, nothing is counted"])
    sites = [node for node in gm.graph.nodes if Kind.EXPERTS in kind_of(node)]
    return Outcome(fired=[_counted(node, slots, number) for number, node in enumerate(sites)])


def _counted(node: Node, slots: Node, number: int) -> Fired:
    ids, chosen_by_router = _choices(node)
    counted = ExpertCounts(number, module_path(node), chosen_by_router)
    counts = add_input(
        node.graph,
        counted.name,
        NodeRecord(input=counted),
        partial(torch.empty, counted.experts, dtype=torch.int64, device=value(node).device),
    )
    counting = insert(node, ops.count_experts.overload, ids, slots, counts)
    return Fired("expert_load", node, {}, set(), [counting])


def _choices(node: Node) -> tuple[Argument, int]:
    """What the router chose for the tokens of this process, and the number of experts that these
    are ids of.
    """
    arguments = arguments_of(node)
    ids = arguments["ids"]
    assert isinstance(ids, Node)
    for sent in ids.all_input_nodes:
        if op_of(sent.target) is ops.dispatch_tokens:
            arguments = arguments_of(sent)
    if isinstance(places := arguments.get("places"), Node):
        return arguments["ids"], value(places).shape[1]
    weight = arguments["w2"]
    assert isinstance(weight, Node)
    return ids, len(value(weight)) - record_of(node).shared_experts
