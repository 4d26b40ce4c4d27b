"""Quantize before a view instead of behind it, so that the norm before the view can quantize.

x > view > quantizer -> codes, scales    =>    x > quantizer -+-> view -> codes
                                                              +-> view -> scales

Models of transformers flatten [B, T, D] before the experts of a mixture. Only if the last dimension
stays, and x is contiguous. Exact.
"""

import operator
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.canonical import call, value
from atomc.graph.edit import infer
from atomc.graph.sizes import known_equal
from atomc.passes.fuse.quantizers import QUANTIZERS
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired

_OPS = {f"atom::{quantizer.op.name}" for quantizer in QUANTIZERS}
_view = torch.ops.aten.view.default


def quantizers_before_views(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Move every such quantizer of the graph."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and call(node).op in _OPS and _can_move(node):
            _move(node)
            yield Fired("quantizers_before_views", node)


def _can_move(node: Node) -> bool:
    here = call(node)
    view = here.operands[0]
    if view.op != "call_function" or call(view).op != "view" or len(view.args) != 2:
        return False
    [x] = call(view).operands
    before, after = value(x), value(view)
    return (
        not here.attrs.get("column_major_scales")
        and before.dim() > 1
        and after.dim() > 1
        and isinstance(before.shape[-1], int)
        and known_equal(before.shape[-1], after.shape[-1])
        and bool(before.is_contiguous())
    )


def _move(node: Node) -> None:
    view = call(node).operands[0]
    [x] = call(view).operands
    sizes = view.args[1]
    assert isinstance(sizes, list | tuple)
    node.replace_input_with(view, x)
    infer(node)
    parts = [user for user in node.users if user.target is operator.getitem]
    for part in reversed(parts):  # directly behind the call, before all views
        node.append(part)
        infer(part)
    last = parts[-1] if parts else node
    for result in parts or [node]:
        last = _insert_view(last, result, [*sizes[:-1], value(result).shape[-1]])


def _insert_view(behind: Node, result: Node, sizes: list[Argument]) -> Node:
    readers = list(result.users)
    with result.graph.inserting_after(behind):
        view = result.graph.call_function(_view, (result, sizes))
    view.meta = {key: x for key, x in result.meta.items() if key != "val"}
    infer(view)
    for reader in readers:
        reader.replace_input_with(result, view)
    return view
