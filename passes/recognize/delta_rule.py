"""Say why a gated delta rule written in PyTorch is not replaced by the op: transformers writes it
as a loop over chunks of tokens, which tracing unrolls. Its length is a part of the graph, and no
pattern has it.

cumsum of decays > exp > * k k^T > solve_triangular > one product and sum per chunk    (no change)
"""

from collections.abc import Iterator

from torch.fx import GraphModule, Node

from atomc.graph.canonical import call
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference

NAME = "gated_delta_rule"
EXPECTED = (
    "a layer that calls the op: atomc.prepare(model) for calls without a cache, or LLM(model)"
)
FOUND = "the loop over chunks of the class, unrolled into this graph"


def delta_rule(gm: GraphModule, context: Context) -> Iterator[NearMiss]:
    """A near miss for each unrolled loop; changes nothing."""
    loops: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        # Two systems have one triangle: that of the values, and that of the keys.
        if call(node).op == "linalg_solve_triangular":
            triangle = call(node).operands[0]
            if _decays(triangle):
                loops.setdefault(triangle, node)
    for triangle, node in loops.items():
        differs = Difference("other op", EXPECTED, FOUND, node)
        yield NearMiss(NAME, "", node, 1, 2, 0, [differs], {triangle, node})


def _decays(triangle: Node) -> bool:
    """Whether it is a product with the exponential of differences of sums."""
    factors = call(triangle).operands if call(triangle).op == "mul" else []
    return any(call(each).op == "exp" for each in factors)
