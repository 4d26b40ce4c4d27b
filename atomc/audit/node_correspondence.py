"""Maps nodes of the captured graph to the nodes of the lowered graph with the same value."""

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from atomc.graph.canonical import value
from atomc.graph.node_record import record_of
from atomc.graph.sizes import same_shape


def copy_graph(gm: GraphModule) -> GraphModule:
    """A copy of the graph with the same node names; values and metadata are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


class NodeCorrespondence:
    """Records how passes replace the nodes of `gm`, until `end`.

    captured  the graph before all passes
    fused     the graph after the last pass, before ops are lowered to kernels
    """

    def __init__(self, gm: GraphModule):
        self.captured = self.fused = copy_graph(gm)
        self._replaced_by: dict[str, str] = {}
        self._absorbed: list[
            tuple[str, frozenset[str]]
        ] = []  # (rewrite, origins) of each erased node
        self._gm = gm
        gm._register_replace_node_hook(self._replaced)
        gm._register_erase_node_hook(self._erased)

    def _replaced(self, old: Node, new: str, user: Node) -> None:
        self._replaced_by[old.name] = new

    def _erased(self, node: Node) -> None:
        record = record_of(node)
        if record.site is not None:
            self._absorbed.append((record.site[0], record.origins))

    def end(self) -> None:
        """Stop recording after the last pass; lowering only assigns kernels to nodes."""
        self._gm._unregister_replace_node_hook(self._replaced)
        self._gm._unregister_erase_node_hook(self._erased)
        self.fused = copy_graph(self._gm)

    def rewrites_of(self, node: Node) -> list[str]:
        """The rewrites that produced a node and the nodes that it absorbed; that of the node itself
        last.
        """
        record = record_of(node)
        names = {
            name: None for name, made_of in self._absorbed if made_of and made_of <= record.origins
        }
        last, _ = record.site or ("", "")
        return [name for name in names if name != last] + [last] * bool(last)

    def counterparts(self, graph: Graph) -> dict[Node, Node]:
        """Captured node -> the node of `graph` with the same value, for those that have one."""
        nodes = {node.name: node for node in graph.nodes}
        pairs = {}
        for node in self.captured.graph.nodes:
            for name in self._names_of(node):
                other = nodes.get(name)
                if other is not None and _comparable(node, other):
                    pairs[node] = other
                    break
        return pairs

    def _names_of(self, node: Node) -> Iterator[str]:
        """The node's name, then the name of its replacement, and so on."""
        name, seen = node.name, set[str]()
        while name not in seen:
            yield name
            seen.add(name)
            name = self._replaced_by.get(name, name)


def _comparable(node: Node, other: Node) -> bool:
    """Whether the two can have the same value. An input that is written in place does not keep the
    captured one's value.
    """
    if (node.op == "placeholder") != (other.op == "placeholder"):
        return False
    a, b = value(node), value(other)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and same_shape(a, b)
    return type(a) is type(b)
