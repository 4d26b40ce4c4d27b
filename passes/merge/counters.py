"""Add to the counters of all layers at once, behind all that reads them.

    add_(first, 1); ... add_(second, 1); ...   =>   ... ...; _foreach_add_([first, second], 1)

A counter is an input of one integer, such as the length of a layer of a static cache. One that is
read after the addition is left alone.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from atomc.graph.canonical import value
from atomc.graph.mutation import storage
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired


def counters(gm: GraphModule, context: Context) -> Outcome:
    """Move the additions to counters to the end of the graph, those of one number into one call."""
    output = gm.graph.output_node()
    additions: dict[object, list[Node]] = defaultdict(list)
    for node in _additions(gm.graph):
        (counter,) = node.all_input_nodes
        additions[node.args[1], value(counter).device, value(counter).dtype].append(node)
    fired = []
    for nodes in additions.values():
        output.prepend(nodes[0])
        fired.append(_joined(nodes) if len(nodes) > 1 else Fired("counters", nodes[0]))
    return Outcome(fired)


def _additions(graph: Graph) -> Iterator[Node]:
    """Additions of a number to a counter that no later node reads."""
    last_reader = {
        storage(operand): node for node in graph.nodes for operand in node.all_input_nodes
    }
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.add_.Tensor):
        counter, amount = node.args
        if (
            counter.op == "placeholder"
            and isinstance(amount, int)
            and not node.kwargs
            and value(counter).dim() == 0
            and not value(counter).dtype.is_floating_point
            and last_reader[counter] is node
        ):
            yield node


def _joined(nodes: list[Node]) -> Fired:
    """Replace additions of the same number by one call in the place of the first."""
    first = nodes[0]
    with first.graph.inserting_before(first):
        added = first.graph.call_function(
            torch.ops.aten._foreach_add_.Scalar, ([node.args[0] for node in nodes], first.args[1])
        )
    added.meta.update({**first.meta, "val": None})
    for node in nodes:
        node.graph.erase_node(node)
    return Fired("counters", first, {}, {*nodes}, [added])
