"""Let an add with a norm leave out a sum without readers, as of layers with the norm behind the sum
(BERT), and of the last norm of a model.

add_rms_norm(x, residual, weight, eps)[0]    =>    add_rms_norm(..., keep_sum=False)[0]
"""

from torch.fx import GraphModule, Node

from atomc.graph.edit import infer
from atomc.graph.op_call import op_call
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired


def unread_sums(gm: GraphModule, context: Context) -> list[Fired]:
    """Turn `keep_sum` off in calls whose sum, the second result, is not read."""
    fired = []
    for node in list(gm.graph.nodes):
        called = op_call(node)
        if called is None or not called.arguments.get("keep_sum") or _reads_sum(node):
            continue
        for unread in [part for part in node.users if part.args[1] == 1]:
            gm.graph.erase_node(unread)
        node.kwargs = {**node.kwargs, "keep_sum": False}
        infer(node)
        fired.append(Fired("unread_sums", node))
    return fired


def _reads_sum(node: Node) -> bool:
    return any(part.args[1] == 1 and part.users for part in node.users)
