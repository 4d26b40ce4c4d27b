"""Bytes that need not move: what a rewrite would save where it nearly fired, and what neighbours would save as one kernel.

Kernels that run as one read once what two of them read, and neither write nor read what passes between them. Matrix
products and attention are left out of neighbours: what stands next to them is not fused for its bytes alone.
"""

import re
from collections.abc import Collection, Iterator, Sequence

import sympy
from torch.fx import Graph, GraphModule, Node

from atomc.cost import NodeCost, bytes_of, is_product, shown, simple, source_of, symbols_of
from atomc.graph.canonical import value
from atomc.op import op_of
from atomc.op_traits import Kind
from atomc.report import Miss, Saving

# What a neighbour is not fused with for its bytes alone: ops that are nothing else, and by their names those of PyTorch.
APART = (Kind.LINEAR, Kind.ATTENTION, Kind.LOOKUP, Kind.COLLECTIVE)
_APART = re.compile("linear|attention|embedding|index_select|all_reduce|sort|topk")


def savings(gm: GraphModule, costs: Sequence[NodeCost], near: Sequence[Miss], *, glue_fuses: bool) -> list[Saving]:
    """Of a graph before lowering. glue_fuses: whether pointwise nodes that meet run as one kernel."""
    traffic = _Traffic(gm.graph, costs)
    return [*_of_misses(traffic, near), *_of_neighbours(traffic), *([] if glue_fuses else _of_glue(costs))]


class _Traffic:
    """Which kernel writes and which ones read each tensor."""

    def __init__(self, graph: Graph, costs: Sequence[NodeCost]):
        self.costs, self.sizes = costs, symbols_of(graph)
        self.kernel_of = {node: i for i, cost in enumerate(costs) for node in cost.nodes}
        self.number = {node.name: i for node, i in self.kernel_of.items()}
        self.reads: list[dict[Node, None]] = []
        self.readers: dict[Node, set[int]] = {}
        for i, cost in enumerate(costs):
            inside = set(cost.nodes)
            read = {shown(x): None for node in cost.nodes for x in node.all_input_nodes if source_of(x) not in inside}
            self.reads.append(read)
            for tensor in read:
                self.readers.setdefault(tensor, set()).add(i)
        self.returned = {shown(node) for node in graph.output_node().all_input_nodes}

    def writer(self, tensor: Node) -> int | None:
        return self.kernel_of.get(source_of(tensor))

    def saved(self, kernels: Collection[int]) -> sympy.Expr:
        """Bytes that these kernels would not move if they were one."""
        total: sympy.Expr = sympy.Integer(0)
        for tensor in dict.fromkeys(tensor for i in kernels for tensor in self.reads[i]):
            readers = self.readers[tensor]
            if self.writer(tensor) in kernels:
                outside = tensor in self.returned or not readers <= set(kernels)
                times = len(readers & set(kernels)) + (not outside)
            else:
                times = len(readers & set(kernels)) - 1
            total += times * bytes_of(value(tensor))
        return simple(total.xreplace(self.sizes))

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """Kernels of which the second reads the first, and nothing that was made of it in between."""
        depth: list[int] = []
        written = [{w for tensor in read if (w := self.writer(tensor)) is not None} for read in self.reads]
        for i in sorted(range(len(self.costs)), key=lambda i: max(self.costs[i].nodes)):
            depth.extend([0] * (i + 1 - len(depth)))
            depth[i] = 1 + max((depth[w] for w in written[i] if w < len(depth)), default=0)
        for i, writers in enumerate(written):
            yield from ((w, i) for w in sorted(writers) if depth[i] == depth[w] + 1)


def _of_misses(traffic: _Traffic, near: Sequence[Miss]) -> Iterator[Saving]:
    for miss in near:
        kernels = {traffic.number[name] for name in miss.nodes if name in traffic.number}
        yield Saving("near miss", miss.rewrite, miss.module_path, miss.layer, miss.source, str(traffic.saved(kernels)))


def _of_neighbours(traffic: _Traffic) -> Iterator[Saving]:
    for first, second in traffic.neighbours():
        one, other = traffic.costs[first], traffic.costs[second]
        if _apart(one) or _apart(other):
            continue
        saved = traffic.saved({first, second})
        if saved != 0:
            yield Saving("neighbours", f"{one.op} > {other.op}", other.module_path, other.layer, other.source, str(saved))


def _of_glue(costs: Sequence[NodeCost]) -> Iterator[Saving]:
    for cost in costs:
        saved = simple(cost.apart - cost.cost.bytes)
        if saved != 0 and cost.op == "glue":
            yield Saving("glue", f"{len(cost.nodes)} ops", cost.module_path, cost.layer, cost.source, str(saved))


def _apart(kernel: NodeCost) -> bool:
    op = op_of(kernel.nodes[0].target)
    if op is not None:
        return op.kind in APART
    return is_product(kernel.nodes[0]) or _APART.search(kernel.op) is not None
