"""Fusion opportunities: the memory traffic that near misses, and pairs of neighbouring kernels,
would save if fused.

A fused kernel reads a common input once, and neither writes nor reads the tensors between its
parts. Matrix products and attention are excluded from pairs of neighbours: fusing into them is not
decided by traffic alone.
"""

import re
from collections.abc import Collection, Iterator, Sequence

import sympy
from torch.fx import Graph, GraphModule, Node

from atomc.cost.cost import NodeCost, bytes_of, is_product, simplified
from atomc.graph.canonical import value
from atomc.graph.step_symbols import symbols_of
from atomc.graph.views import storage_node, view_base
from atomc.ops.op import op_of
from atomc.ops.op_traits import Kind
from atomc.report.records import FusionOpportunity, Miss

# Excluded from pairs of neighbours: our ops of these kinds only, and ops of PyTorch by name.
NEVER_FUSED = (Kind.LINEAR, Kind.ATTENTION, Kind.LOOKUP, Kind.COLLECTIVE)
_NEVER_FUSED_NAMES = re.compile("linear|attention|embedding|index_select|all_reduce|sort|topk")


def fusion_opportunities(
    gm: GraphModule, costs: Sequence[NodeCost], near: Sequence[Miss], *, glue_fuses: bool
) -> list[FusionOpportunity]:
    """The opportunities in a graph before lowering. glue_fuses: whether connected pointwise nodes
    run as one kernel.
    """
    traffic = _Traffic(gm.graph, costs)
    return [
        *_near_miss_savings(traffic, near),
        *_neighbour_savings(traffic),
        *([] if glue_fuses else _glue_savings(costs)),
    ]


class _Traffic:
    """The kernels that write and read each tensor."""

    def __init__(self, graph: Graph, costs: Sequence[NodeCost]):
        self.costs, self.sizes = costs, symbols_of(graph)
        self.kernel_of = {node: i for i, cost in enumerate(costs) for node in cost.nodes}
        self.number = {node.name: i for node, i in self.kernel_of.items()}
        self.reads: list[dict[Node, None]] = []
        self.readers: dict[Node, set[int]] = {}
        for i, cost in enumerate(costs):
            inside = set(cost.nodes)
            read = {
                view_base(x): None
                for node in cost.nodes
                for x in node.all_input_nodes
                if storage_node(x) not in inside
            }
            self.reads.append(read)
            for tensor in read:
                self.readers.setdefault(tensor, set()).add(i)
        self.returned = {view_base(node) for node in graph.output_node().all_input_nodes}

    def writer(self, tensor: Node) -> int | None:
        return self.kernel_of.get(storage_node(tensor))

    def saved(self, kernels: Collection[int]) -> sympy.Expr:
        """Bytes of traffic that fusing these kernels would save."""
        total: sympy.Expr = sympy.Integer(0)
        for tensor in dict.fromkeys(tensor for i in kernels for tensor in self.reads[i]):
            readers = self.readers[tensor]
            if self.writer(tensor) in kernels:
                outside = tensor in self.returned or not readers <= set(kernels)
                times = len(readers & set(kernels)) + (not outside)
            else:
                times = len(readers & set(kernels)) - 1
            total += times * bytes_of(value(tensor))
        return simplified(total.xreplace(self.sizes))

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """(writer, reader) for kernels without a kernel on a path between them."""
        depth: list[int] = []
        written = [
            {w for tensor in read if (w := self.writer(tensor)) is not None} for read in self.reads
        ]
        for i in sorted(range(len(self.costs)), key=lambda i: max(self.costs[i].nodes)):
            depth.extend([0] * (i + 1 - len(depth)))
            depth[i] = 1 + max((depth[w] for w in written[i] if w < len(depth)), default=0)
        for i, writers in enumerate(written):
            yield from ((w, i) for w in sorted(writers) if depth[i] == depth[w] + 1)


def _near_miss_savings(traffic: _Traffic, near: Sequence[Miss]) -> Iterator[FusionOpportunity]:
    for miss in near:
        kernels = {traffic.number[name] for name in miss.nodes if name in traffic.number}
        saved = str(traffic.saved(kernels))
        yield FusionOpportunity(
            "near miss", miss.rewrite, miss.module_path, miss.layer, miss.source, saved
        )


def _neighbour_savings(traffic: _Traffic) -> Iterator[FusionOpportunity]:
    for first, second in traffic.neighbours():
        one, other = traffic.costs[first], traffic.costs[second]
        if _never_fused(one) or _never_fused(other):
            continue
        saved = traffic.saved({first, second})
        if saved != 0:
            yield FusionOpportunity(
                "neighbours",
                f"{one.op} > {other.op}",
                other.module_path,
                other.layer,
                other.source,
                str(saved),
            )


def _glue_savings(costs: Sequence[NodeCost]) -> Iterator[FusionOpportunity]:
    for cost in costs:
        saved = simplified(cost.apart - cost.cost.bytes)
        if saved != 0 and cost.op == "glue":
            yield FusionOpportunity(
                "glue",
                f"{len(cost.nodes)} ops",
                cost.module_path,
                cost.layer,
                cost.source,
                str(saved),
            )


def _never_fused(kernel: NodeCost) -> bool:
    op = op_of(kernel.nodes[0].target)
    if op is not None:
        return op.kind in NEVER_FUSED
    return is_product(kernel.nodes[0]) or _NEVER_FUSED_NAMES.search(kernel.op) is not None
