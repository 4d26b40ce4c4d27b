"""Output for torch's own tools: graphs in the structured trace, and names of nodes for profiler
ranges.
"""

from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

from atomc.graph.graph_printer import graph_text
from atomc.graph.node_record import record_of
from atomc.graph.provenance import module_path
from atomc.graph.views import ZERO_COST, name_of
from atomc.token_range import ALL_TOKENS
from atomc.torch_compat.core import structured_trace, traces_structured

Observer = Callable[[str, GraphModule], None]


def observers() -> list[Observer]:
    """One observer, which writes each graph to the structured trace if that is enabled
    (TORCH_TRACE=folder).
    """
    return [_structured_trace_writer()] if traces_structured() else []


def _structured_trace_writer() -> Observer:
    """Writes graphs numbered in the order of the passes, so that two consecutive ones show the
    effect of one pass.
    """
    number = 0

    def write(name: str, gm: GraphModule) -> None:
        nonlocal number
        tokens = gm.meta.get("tokens", ALL_TOKENS)
        suffix = ""
        if name == "lower" and tokens != ALL_TOKENS:
            suffix = "_" + str(tokens).replace(" ", "_")
        structured_trace(f"atomc_{number:02d}_{name}{suffix}", lambda: graph_text(gm))
        number += 1

    return write


def labels_of(graph: Graph) -> dict[str, str]:
    """Node -> the name of its profiler range, "model.layers.3.mlp: silu_and_mul [triton]", for
    nodes that compute.
    """
    return {
        node.name: label_of(node)
        for node in graph.nodes
        if node.op == "call_function" and (record_of(node).op or name_of(node) not in ZERO_COST)
    }


def label_of(node: Node) -> str:
    kernel = record_of(node).kernel
    by = f" [{kernel}]" if kernel else ""
    return f"{module_path(node) or '-'}: {name_of(node)}{by}"
