"""The sites of an audit: ops of a lowered graph, each with the original nodes that it replaces.

The outputs of a site correspond to captured nodes. The original nodes of an output, its slice, are
the captured nodes between it and the nearest values that the lowered graph also computes.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from atomc.audit.node_correspondence import NodeCorrespondence
from atomc.graph.canonical import VIEWS, call
from atomc.graph.node_record import is_cache, record_of
from atomc.graph.provenance import layer_of, module_path, source_line
from atomc.ops.op import op_of

# Nodes that may select the outputs of a site from an op's result.
_VALUE_ACCESS = VIEWS | {"getitem", "slice", "split_with_sizes", "permute"}


@dataclass(frozen=True)
class Slice:
    """The original nodes, in order; the last one has the value of `output` in the lowered graph.

    given  their inputs: captured node -> lowered node
    """

    output: Node
    nodes: tuple[Node, ...]
    given: dict[Node, Node]


@dataclass(frozen=True)
class AuditSite:
    """One op of the lowered graph.

    rewrite   the rewrite that created it; "lift" for an op of the program
    rewrites  the rewrites whose results it absorbed, then its own
    slices    one for each of its outputs that corresponds to a captured node
    whole     whether these are all of its outputs
    cached    whether it reads a cache, whose content is the responsibility of the site that wrote
              it
    between   the nodes from it to these outputs
    """

    node: Node
    op: str
    kernel: str
    rewrite: str
    rewrites: tuple[str, ...]
    module_path: str
    layer: int | None
    source: str
    slices: tuple[Slice, ...]
    whole: bool
    cached: bool
    between: tuple[Node, ...]


def audit_sites(
    lowered: GraphModule, correspondence: NodeCorrespondence, *, from_start: bool = True
) -> list[AuditSite]:
    """All sites, in the order of the graph.

    from_start  False if attention reads rows that were cached before this call, which the graph
                does not contain
    """
    pairs = correspondence.counterparts(lowered.graph)
    captured_of: dict[Node, Node] = {}
    for captured, node in pairs.items():
        captured_of.setdefault(node, captured)
    position = {node: i for i, node in enumerate(lowered.graph.nodes)}
    captured_order = {node: i for i, node in enumerate(correspondence.captured.graph.nodes)}
    sites = []
    for node in lowered.graph.nodes:
        record = record_of(node)
        if not record.op or node.op != "call_function":
            continue
        outputs, between, whole = _outputs(node, captured_of)
        before = {a: b for a, b in pairs.items() if position[b] < position[node]}
        slices = [_slice(captured_of[output], output, before, captured_order) for output in outputs]
        cached = any(map(is_cache, node.all_input_nodes)) and _any_attends_to_cache(slices)
        if cached and not from_start:
            slices = []
        rewrite, path = record.site or ("lift", module_path(node))
        sites.append(
            AuditSite(
                node,
                record.op,
                record.kernel or "inline",
                rewrite,
                tuple(correspondence.rewrites_of(node)),
                path,
                layer_of(path),
                source_line(node),
                tuple(slices),
                whole,
                cached,
                tuple(between),
            )
        )
    return sites


def _outputs(node: Node, captured_of: dict[Node, Node]) -> tuple[list[Node], list[Node], bool]:
    """(outputs of a site that correspond to captured nodes, the nodes between, whether these are
    all of its outputs).
    """
    outputs, between, waiting, whole = [], [], [node], bool(node.users)
    for here in waiting:
        if here in captured_of:
            outputs.append(here)
        elif all(_accesses_value(reader, here) for reader in here.users):
            waiting += here.users
        else:
            whole = False
        if here is not node:
            between.append(here)
    return outputs, between, whole


def _accesses_value(reader: Node, source: Node) -> bool:
    return reader.target is operator.getitem or (
        call(reader).op in _VALUE_ACCESS and reader.all_input_nodes == [source]
    )


def _slice(root: Node, output: Node, before: dict[Node, Node], order: dict[Node, int]) -> Slice:
    """The captured nodes from `root` back to values that are computed before the site."""
    nodes, inputs, waiting = {root}, {}, [root]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand in before:
                inputs[operand] = before[operand]
            elif operand not in nodes:
                nodes.add(operand)
                waiting.append(operand)
    return Slice(output, tuple(sorted(nodes, key=lambda n: order[n])), inputs)


def _any_attends_to_cache(slices: Sequence[Slice]) -> bool:
    """Whether one has an op with state, whose earlier rows are not in the captured graph."""
    nodes = [(op_of(node.target), node) for part in slices for node in part.nodes]
    return any(op and op.handle(*node.args, **node.kwargs) is not None for op, node in nodes)


def rewrite_order(sites: Iterable[AuditSite], order: Sequence[str]) -> list[str]:
    """The rewrites of these sites, in the order in which they ran."""
    names = dict.fromkeys(site.rewrite for site in sites)
    return sorted(names, key=lambda name: order.index(name) if name in order else -1)
