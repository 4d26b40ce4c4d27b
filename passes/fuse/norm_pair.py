"""Fuse two norms of products of one input, such as those of the latents of queries and of keys and
values (DeepSeek), with their quantizers.

           +- [..., :Q] -----> rms_norm -> q                            +-> q
x > linear +                                   =>  x > linear > rms_norm_pair
           +- [..., Q:Q + L] > rms_norm -> kv                           +-> kv

The linears of the two may be one, or two with the same input. A norm that quantizes its result is
rms_norm_quant; one of the two may do so alone.
"""

import operator
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch.fx import Graph, GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.edit import infer
from atomc.graph.node_record import record_of, set_record
from atomc.graph.op_call import OpCall, op_call
from atomc.graph.provenance import inherited
from atomc.graph.sizes import same_sizes, spell_shape
from atomc.ops.op import op_of
from atomc.rewriting.graph_pass import Change, Context
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired

NAME = "rms_norm_pair"
_QUANTIZER = ("scheme", "dtype", "group", "column_major", "rounding")


def norm_pair(gm: GraphModule, context: Context) -> Iterator[Change | NearMiss]:
    """Fuse each two norms of the graph whose origin is the same."""
    for first, second in list(_pairs(gm.graph)):
        miss = partial(_miss, first, second)
        different = _different(first, second)
        yield (
            miss(different)
            if different
            else Change(first.node, miss, partial(_fuse, first, second))
        )


def _pairs(graph: Graph) -> Iterator[tuple[OpCall, OpCall]]:
    """Norms of one origin, two at a time, in graph order."""
    waiting: dict[Node, OpCall] = {}
    for node in graph.nodes:
        norm = op_call(node)
        if norm is None or norm.op.name not in ("rms_norm", "rms_norm_quant"):
            continue
        other = waiting.pop(_origin(norm), None)
        if other is None:
            waiting[_origin(norm)] = norm
        else:
            yield other, norm


def _origin(norm: OpCall) -> Node:
    """The input of the product of which x is columns; without a product, what x is columns of."""
    node = norm["x"]
    while call(node).op == "slice":
        node = call(node).operands[0]
    op = op_of(node.target)
    return node if op is None or op.concat is None else call(node).operands[0]


def _quantizes(norm: OpCall) -> bool:
    return norm.op is ops.rms_norm_quant


def _different(first: OpCall, second: OpCall) -> Difference | None:
    """Why these are not fused, or None."""
    x, y = value(first["x"]), value(second["x"])
    if not same_sizes(x.shape[:-1], y.shape[:-1]):
        rows = f"rows of {spell_shape(x.shape)}"
        return Difference("size", rows, spell_shape(y.shape), second.node)
    both = _quantizes(first) and _quantizes(second)
    for name in ("eps", "style", *(_QUANTIZER if both else ())):
        one, other = first.arguments[name], second.arguments[name]
        if one != other:
            expected = f"one {name} for both norms (first {one})"
            return Difference("scalar", expected, str(other), second.node)
    if _depends(second.node, first.node):
        independent = "two norms that do not depend on each other"
        return Difference("cycle", independent, "the second reads the first", second.node)
    return None


def _depends(node: Node, on: Node) -> bool:
    """Whether a node reads another, directly or through nodes in between."""
    waiting, seen = [node], {node}
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand is on:
                return True
            if operand > on and operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return False


def _miss(first: OpCall, second: OpCall, difference: Difference) -> NearMiss:
    nodes = {first.node, second.node}
    return NearMiss(NAME, "", second.node, 2, 2, 0, [difference], nodes)


def _fuse(first: OpCall, second: OpCall) -> Fired:
    swapped = _quantizes(second) and not _quantizes(first)
    x_norm, y_norm = (second, first) if swapped else (first, second)
    x, y = x_norm.arguments, y_norm.arguments
    last = max(x_norm.node, y_norm.node)
    operands = (x["x"], y["x"], x["weight"], y["weight"], x["eps"])
    with last.graph.inserting_after(last):
        if _quantizes(x_norm):
            fused = last.graph.call_function(
                ops.rms_norm_pair_quant.overload,
                (*operands, x["scale"], y.get("scale"), x["style"]),
                {
                    **{name: x[name] for name in _QUANTIZER},
                    "quantize_y": _quantizes(y_norm),
                    "keep_x": x["keep"],
                    "keep_y": y.get("keep", False),
                },
            )
        else:
            fused = last.graph.call_function(ops.rms_norm_pair.overload, (*operands, x["style"]))
    attrs = {name: x[name] for name in ("eps", "style", "scheme") if name in x}
    consumed = tuple(call(norm.node).op for norm in (first, second))
    fused.meta.update(inherited((first.node, second.node), first.node, NAME, consumed))
    infer(fused)
    one = 5 if _quantizes(x_norm) else 1
    _replace(x_norm, fused, (0, 1, 4) if _quantizes(x_norm) else (0,))
    _replace(y_norm, fused, (2, 3, 5) if _quantizes(y_norm) else (one,))
    return Fired(NAME, first.node, attrs, {first.node, second.node}, [fused], consumed)


def _replace(norm: OpCall, fused: Node, results: tuple[int, ...]) -> None:
    """Let the readers of a norm read these results of the op that replaces it."""
    parts = list(norm.node.users) if _quantizes(norm) else [norm.node]
    for part in parts:
        at = part.args[1] if _quantizes(norm) else 0
        assert isinstance(at, int)
        with fused.graph.inserting_after(fused):
            new = fused.graph.call_function(operator.getitem, (fused, results[at]))
        new.meta = {**part.meta, "val": value(fused)[results[at]]}
        set_record(new, replace(record_of(part), made_by=NAME))
        part.replace_all_uses_with(new)
        fused.graph.erase_node(part)
    if _quantizes(norm):
        fused.graph.erase_node(norm.node)
