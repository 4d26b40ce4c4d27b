"""What atomc notes about a node: one value in its metadata, which copies of the node share."""

from dataclasses import dataclass

from torch.fx import Graph, Node

from atomc.graph.variable_float import FloatInput
from atomc.ops.inputs import GraphInput, StateInput, StepInput
from atomc.ops.op import Extra
from atomc.weights.packed import PackedInput

RECORD = "atomc"


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The notes of all stages; of a node without notes, the defaults.

    made_by   the rewrite that made the node
    origins   names of the nodes of the traced graph that it computes; empty: its own name
    consumed  the ops that it replaces
    site      rewrite and module path of the site in which it was made
    shared_experts  how many shared experts an op of experts computes as its last ones
    op        the op that was lowered to this call
    kernel    the provider of the kernel that is called; empty for the reference of an op
    source    of an input of the traced graph: Dynamo's expression for it
    float_input, packed, extra, input  of an input of one of these kinds; None for weights
    """

    made_by: str = ""
    origins: frozenset[str] = frozenset()
    consumed: tuple[str, ...] = ()
    site: tuple[str, str] | None = None
    shared_experts: int = 0
    op: str = ""
    kernel: str = ""
    source: str | None = None
    float_input: FloatInput | None = None
    packed: PackedInput | None = None
    extra: Extra | None = None
    input: GraphInput | None = None


_EMPTY = NodeRecord()


def record_of(node: Node) -> NodeRecord:
    record: NodeRecord = node.meta.get(RECORD, _EMPTY)
    return record


def set_record(node: Node, record: NodeRecord) -> None:
    node.meta[RECORD] = record


def origins_of(node: Node) -> frozenset[str]:
    """Names of the nodes of the traced graph that a node computes, at least its own."""
    return record_of(node).origins or frozenset([node.name])


def step_input(node: Node) -> StepInput | None:
    graph_input = record_of(node).input
    return graph_input if isinstance(graph_input, StepInput) else None


def step_node(graph: Graph, *fields: str) -> Node | None:
    """The first graph input that is one of these tensors of the step, or None."""
    return next(
        (
            node
            for node in graph.find_nodes(op="placeholder")
            if (of := step_input(node)) and of.field in fields and of.dim is None
        ),
        None,
    )


def is_cache(node: Node) -> bool:
    """Whether it is a tensor of state, which the runtime allocates."""
    graph_input = record_of(node).input
    return isinstance(graph_input, StateInput) and not graph_input.is_scale
