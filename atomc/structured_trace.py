"""What torch's own tools see of a graph: itself in the structured trace, and the names of its nodes in profiles."""

from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

from atomc.cost import FREE, name_of
from atomc.graph.provenance import module_path
from atomc.graph_printer import listing
from atomc.op import ALL_TOKENS
from atomc.torch_compat.names import structured_trace, traces_structured

Observer = Callable[[str, GraphModule], None]


def observers() -> list[Observer]:
    """One that writes each graph it is shown to the structured trace, if there is one (TORCH_TRACE=folder)."""
    return [_numbered()] if traces_structured() else []


def _numbered() -> Observer:
    """Names in the order of the passes, so that what a pass did lies between two neighbours of the list."""
    number = 0

    def write(name: str, gm: GraphModule) -> None:
        nonlocal number
        tokens = gm.meta.get("tokens", ALL_TOKENS)
        behind = ""
        if name == "lower" and tokens != ALL_TOKENS:
            behind = "_" + str(tokens).replace(" ", "_")
        structured_trace(f"atomc_{number:02d}_{name}{behind}", lambda: listing(gm))
        number += 1

    return write


def labels_of(graph: Graph) -> dict[str, str]:
    """Node -> the name of its range, "model.layers.3.mlp: silu_and_mul [triton]", of all that compute."""
    return {node.name: label_of(node) for node in graph.nodes
            if node.op == "call_function" and ("op" in node.meta or name_of(node) not in FREE)}  # fmt: skip


def label_of(node: Node) -> str:
    by = f" [{node.meta['kernel']}]" if "kernel" in node.meta else ""
    return f"{module_path(node) or '-'}: {name_of(node)}{by}"
