"""Follows a graph through the passes: which node of the lowered graph has the value of which captured one."""

from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule, Node

from atomc.graph.canonical import value
from atomc.graph.sizes import same_shape


def copied(gm: GraphModule) -> GraphModule:
    """The same graph again, under the same names; values and metadata are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


class Trail:
    """What becomes of the nodes of `gm`, from the captured graph on until `end`.

    captured  the graph before any pass
    fused     the graph behind the last one, where ops have no kernels yet
    """

    def __init__(self, gm: GraphModule):
        self.captured = self.fused = copied(gm)
        self._read_instead: dict[str, str] = {}
        self._taken_in: list[tuple[str, frozenset[str]]] = []  # rewrite, and what the node was made of that is gone
        self._gm = gm
        gm._register_replace_node_hook(self._replaced)
        gm._register_erase_node_hook(self._erased)

    def _replaced(self, old: Node, new: str, user: Node) -> None:
        self._read_instead[old.name] = new

    def _erased(self, node: Node) -> None:
        if "site" in node.meta:
            self._taken_in.append((node.meta["site"][0], frozenset(node.meta.get("origins", ()))))

    def end(self) -> None:
        """The passes are done; lowering only gives nodes their kernels."""
        self._gm._unregister_replace_node_hook(self._replaced)
        self._gm._unregister_erase_node_hook(self._erased)
        self.fused = copied(self._gm)

    def rewrites_of(self, node: Node) -> list[str]:
        """The rewrites that made a node, one of what another had made, the last one last."""
        origins = node.meta.get("origins", frozenset())
        found = {name: None for name, made_of in self._taken_in if made_of and made_of <= origins}
        last = node.meta.get("site", ("", ""))[0]
        return [name for name in found if name != last] + [last] * bool(last)

    def stand_ins(self, graph: Graph) -> dict[Node, Node]:
        """For each node of the captured graph the one with its value in `graph`, if there is one."""
        nodes = {node.name: node for node in graph.nodes}
        found = {}
        for node in self.captured.graph.nodes:
            for name in self._names_of(node):
                other = nodes.get(name)
                if other is not None and _alike(node, other):
                    found[node] = other
                    break
        return found

    def _names_of(self, node: Node) -> Iterator[str]:
        """What the node was called, then what was read in its place, and so on."""
        name, seen = node.name, set[str]()
        while name not in seen:
            yield name
            seen.add(name)
            name = self._read_instead.get(name, name)


def _alike(node: Node, other: Node) -> bool:
    """Whether the two can have the same value. A graph input that is written in place has it only for a while."""
    if (node.op == "placeholder") != (other.op == "placeholder"):
        return False
    a, b = value(node), value(other)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and same_shape(a, b)
    return type(a) is type(b)
