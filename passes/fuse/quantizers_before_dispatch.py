"""Quantize tokens before they are sent to the experts of other processes instead of behind, so that
codes travel, and each process quantizes its own tokens.

x > dispatch_tokens > quantizer -> codes, scales
 =>
x > quantizer -> codes, scales > dispatch_tokens -> codes, scales

Of codes of one byte with a scale for each row, for each group of columns, or for all. Exact.
"""

import operator
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.edit import infer, insert, replace
from atomc.graph.op_call import arguments_of, called_op
from atomc.ops.op import op_of
from atomc.passes.fuse.quantizers import QUANTIZERS
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

_OPS = tuple(quantizer.op for quantizer in QUANTIZERS if quantizer.scheme.startswith("fp8"))


def quantizers_before_dispatch(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Move every such quantizer of the graph."""
    for node in list(gm.graph.nodes):
        if op_of(node.target) in _OPS and (sent := _sent_for(node)) is not None:
            _move(node, sent)
            yield Fired("quantizers_before_dispatch", sent)


def _sent_for(node: Node) -> Node | None:
    """The call that sends the tokens which only this quantizer reads, or None."""
    arguments = arguments_of(node)
    tokens, scale = arguments["x"], arguments.get("scale")
    if not isinstance(tokens, Node) or tokens.target is not operator.getitem:
        return None
    if tokens.args[1] != 0 or len(tokens.users) > 1 or arguments.get("column_major_scales"):
        return None
    sent = tokens.args[0]
    if not isinstance(sent, Node) or op_of(sent.target) is not ops.dispatch_tokens:
        return None
    # One that is computed may follow the call.
    return None if isinstance(scale, Node) and scale.op != "placeholder" else sent


def _move(node: Node, sent: Node) -> None:
    [tokens] = [user for user in sent.users if user.args[1] == 0]
    arguments, quantizer = arguments_of(sent), called_op(node)
    operands = {**arguments_of(node), "x": arguments["x"]}
    codes, scale = insert(sent, quantizer.overload, **operands), None
    if quantizer is not ops.quant_fp8_static:
        codes, scale = (insert(sent, operator.getitem, codes, i) for i in (0, 1))
    sent.args, sent.kwargs = (), {**arguments, "x": codes, "x_scale": scale}
    for changed in (sent, *sent.users):
        infer(changed)
    if scale is None:
        replace(node, tokens)
        return
    scales = insert(node, operator.getitem, sent, 3)
    for result in list(node.users):
        replace(result, tokens if result.args[1] == 0 else scales)
    node.graph.erase_node(node)
