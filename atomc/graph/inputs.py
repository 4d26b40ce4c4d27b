"""What the runtime passes to an input of a graph, in the metadata of the input's node."""

from torch.fx import Node

from atomc.ops.inputs import GraphInput, StateInput, StepInput


def graph_input(node: Node) -> GraphInput | None:
    """None for what the model owns or computes, and for weights."""
    return node.meta.get("input")


def set_graph_input(node: Node, given: GraphInput) -> None:
    node.meta["input"] = given


def step_input(node: Node) -> StepInput | None:
    given = graph_input(node)
    return given if isinstance(given, StepInput) else None


def is_cache(node: Node) -> bool:
    """Whether the runtime allocates it for a layer's state."""
    given = graph_input(node)
    return isinstance(given, StateInput) and not given.is_scale
