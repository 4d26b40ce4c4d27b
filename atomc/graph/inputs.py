"""Metadata of a graph input: the tensor or size that the runtime passes."""

from torch.fx import Node

from atomc.ops.inputs import GraphInput, StateInput, StepInput


def graph_input(node: Node) -> GraphInput | None:
    """None for weights, buffers and nodes that are not inputs."""
    return node.meta.get("input")


def set_graph_input(node: Node, given: GraphInput) -> None:
    node.meta["input"] = given


def step_input(node: Node) -> StepInput | None:
    given = graph_input(node)
    return given if isinstance(given, StepInput) else None


def is_cache(node: Node) -> bool:
    """Whether it is a tensor of state, which the runtime allocates."""
    given = graph_input(node)
    return isinstance(given, StateInput) and not given.is_scale
