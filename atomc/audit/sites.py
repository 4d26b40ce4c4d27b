"""The places of a lowered graph where something else runs than the program says, and what it says there.

A place is one op of the lowered graph. What it computes has names in the captured graph; between these and the nearest
values that the lowered graph computes, too, lie the original nodes: its slice.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from atomc import ops
from atomc.audit.node_correspondence import Trail
from atomc.graph.canonical import VIEWS, call
from atomc.graph.inputs import is_cache
from atomc.graph.provenance import layer_of, module_path, source_line

# What may stand between an op and the values that a rewrite gives to its readers.
_PARTS = VIEWS | {"getitem", "slice", "split_with_sizes", "permute"}


@dataclass(frozen=True)
class Slice:
    """The original nodes, in order, of which the last gives what `output` of the lowered graph does.

    given  what they read and the lowered graph has: a captured node -> the lowered one
    """

    output: Node
    nodes: tuple[Node, ...]
    given: dict[Node, Node]


@dataclass(frozen=True)
class Place:
    """One op of the lowered graph.

    rewrite   what made it; "lift" if it stood in the program
    rewrites  that, behind those whose results it took in
    slices    for each of its outputs that the captured graph has, too
    whole     whether these are all of its outputs
    cached    whether it reads a cache: what was written there is the fault of the writer
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


def places_of(lowered: GraphModule, trail: Trail, *, from_start: bool = True) -> list[Place]:
    """All of them, in the order of the graph.

    from_start  False if attention sees more than the rows of this call: what was cached before is not in the graph
    """
    found = trail.stand_ins(lowered.graph)
    stands_for: dict[Node, Node] = {}
    for captured, node in found.items():
        stands_for.setdefault(node, captured)
    position = {node: i for i, node in enumerate(lowered.graph.nodes)}
    captured_order = {node: i for i, node in enumerate(trail.captured.graph.nodes)}
    places = []
    for node in lowered.graph.nodes:
        if "op" not in node.meta or node.op != "call_function":
            continue
        outputs, between, whole = _outputs(node, stands_for)
        before = {a: b for a, b in found.items() if position[b] < position[node]}
        slices = [_slice(stands_for[output], output, before, captured_order) for output in outputs]
        cached = _reads_cache(node) and any(_cached(n) for part in slices for n in part.nodes)
        if cached and not from_start:
            slices = []
        rewrite, path = node.meta.get("site", ("lift", module_path(node)))
        places.append(Place(node, node.meta["op"], node.meta.get("kernel", "inline"), rewrite,
                            tuple(trail.rewrites_of(node)), path, layer_of(path), source_line(node),
                            tuple(slices), whole, cached, tuple(between)))  # fmt: skip
    return places


def _outputs(node: Node, stands_for: dict[Node, Node]) -> tuple[list[Node], list[Node], bool]:
    """The values of a place that the captured graph has, too, what lies between it and them, and whether all are such."""
    outputs, between, waiting, whole = [], [], [node], bool(node.users)
    for here in waiting:
        if here in stands_for:
            outputs.append(here)
        elif all(_part(reader, here) for reader in here.users):
            waiting += here.users
        else:
            whole = False
        if here is not node:
            between.append(here)
    return outputs, between, whole


def _part(reader: Node, source: Node) -> bool:
    return reader.target is operator.getitem or (call(reader).op in _PARTS and reader.all_input_nodes == [source])


def _slice(root: Node, output: Node, before: dict[Node, Node], order: dict[Node, int]) -> Slice:
    """Back from `root` to what is known before the place."""
    nodes, given, waiting = {root}, {}, [root]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand in before:
                given[operand] = before[operand]
            elif operand not in nodes:
                nodes.add(operand)
                waiting.append(operand)
    return Slice(output, tuple(sorted(nodes, key=lambda n: order[n])), given)


def _reads_cache(node: Node) -> bool:
    """Whether it reads the tensors that the runtime keeps keys and values in."""
    return any(map(is_cache, node.all_input_nodes))


def _cached(node: Node) -> bool:
    """Attention that owns a cache, of whose earlier rows the captured graph knows nothing."""
    return node.target is ops.attention.overload and len(node.args) > 3 and node.args[3] is not None


def rewrites_in(places: Iterable[Place], order: Sequence[str]) -> list[str]:
    """The rewrites of these places, as they ran."""
    found = dict.fromkeys(place.rewrite for place in places)
    return sorted(found, key=lambda name: order.index(name) if name in order else -1)
