"""Fuse two norms of products of one input, such as those of the latents of queries and of keys and
values (DeepSeek), with their quantizers.

           +- [..., :Q] -----> rms_norm -> q                            +-> q
x > linear +                                   =>  x > linear > rms_norm_pair
           +- [..., Q:Q + L] > rms_norm -> kv                           +-> kv

The linears of the two may be one, or two with the same input. A norm that quantizes its result is
rms_norm_quant; one of the two may do so alone.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.edit import infer
from atomc.graph.node_record import record_of, set_record
from atomc.graph.provenance import inherited
from atomc.graph.sizes import known_equal, spell_shape
from atomc.ops.op import op_of
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired, remove_dead_nodes, sort_topologically

NAME = "rms_norm_pair"
_QUANTIZER = ("scheme", "dtype", "group", "column_major", "rounding")


@dataclass(frozen=True)
class _Norm:
    """A call of rms_norm or rms_norm_quant, with its arguments by name."""

    node: Node
    arguments: Mapping[str, Argument]

    def __getitem__(self, name: str) -> Argument:
        return self.arguments[name]

    @property
    def x(self) -> Node:
        x = self["x"]
        assert isinstance(x, Node)
        return x

    @property
    def quantizes(self) -> bool:
        return "scheme" in self.arguments

    @property
    def origin(self) -> Node:
        """The input of the product of which x is columns; without a product, what x is columns
        of.
        """
        node = self.x
        while call(node).op == "slice":
            node = call(node).operands[0]
        op = op_of(node.target)
        return node if op is None or op.concat is None else call(node).operands[0]


def norm_pair(gm: GraphModule, context: Context) -> Outcome:
    """Fuse each two norms of the graph whose origin is the same."""
    done = Outcome()
    for first, second in list(_pairs(gm.graph)):
        different = _different(first, second)
        off = context.off_here(NAME, first.node)
        if different is not None:
            done.near.append(_miss(first, second, different))
        elif off is not None:
            done.off.add(off.pattern)
            on = Difference("off", f"{NAME} to be on", off.text, first.node)
            done.near.append(_miss(first, second, on))
        else:
            done.fired.append(_fuse(first, second))
    if done.fired:
        sort_topologically(gm.graph)
        remove_dead_nodes(gm.graph)
    return done


def _pairs(graph: Graph) -> Iterator[tuple[_Norm, _Norm]]:
    """Norms of one origin, two at a time, in graph order."""
    waiting: dict[Node, _Norm] = {}
    for node in graph.nodes:
        op = op_of(node.target)
        if op is None or op.name not in ("rms_norm", "rms_norm_quant"):
            continue
        norm = _Norm(node, op.bind(*node.args, **node.kwargs))
        other = waiting.pop(norm.origin, None)
        if other is None:
            waiting[norm.origin] = norm
        else:
            yield other, norm


def _different(first: _Norm, second: _Norm) -> Difference | None:
    """Why these are not fused, or None."""
    x, y = value(first.x), value(second.x)
    if x.dim() != y.dim() or not all(map(known_equal, x.shape[:-1], y.shape[:-1])):
        rows = f"rows of {spell_shape(x.shape)}"
        return Difference("size", rows, spell_shape(y.shape), second.node)
    both = first.quantizes and second.quantizes
    for name in ("eps", "style", *(_QUANTIZER if both else ())):
        if first[name] != second[name]:
            expected = f"one {name} for both norms (first {first[name]})"
            return Difference("scalar", expected, str(second[name]), second.node)
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


def _miss(first: _Norm, second: _Norm, difference: Difference) -> NearMiss:
    nodes = {first.node, second.node}
    return NearMiss(NAME, "", second.node, 2, 2, 0, [difference], nodes)


def _fuse(first: _Norm, second: _Norm) -> Fired:
    x, y = (second, first) if second.quantizes and not first.quantizes else (first, second)
    last = max(x.node, y.node)
    operands = (x.x, y.x, x["weight"], y["weight"], x["eps"])
    with last.graph.inserting_after(last):
        if x.quantizes:
            made = last.graph.call_function(
                ops.rms_norm_pair_quant.overload,
                (*operands, x["scale"], y.arguments.get("scale"), x["style"]),
                {
                    **{name: x[name] for name in _QUANTIZER},
                    "quantize_y": y.quantizes,
                    "keep_x": x["keep"],
                    "keep_y": y.arguments.get("keep", False),
                },
            )
        else:
            made = last.graph.call_function(ops.rms_norm_pair.overload, (*operands, x["style"]))
    attrs = {name: x[name] for name in ("eps", "style", "scheme") if name in x.arguments}
    consumed = tuple(call(norm.node).op for norm in (first, second))
    made.meta.update(inherited((first.node, second.node), first.node, NAME, consumed))
    infer(made)
    _replace(x, made, (0, 1, 4) if x.quantizes else (0,))
    _replace(y, made, (2, 3, 5) if y.quantizes else (5 if x.quantizes else 1,))
    return Fired(NAME, first.node, attrs, {first.node, second.node}, [made], consumed)


def _replace(norm: _Norm, made: Node, results: tuple[int, ...]) -> None:
    """Let the readers of a norm read these results of the op that replaces it."""
    parts = list(norm.node.users) if norm.quantizes else [norm.node]
    for part in parts:
        at = part.args[1] if norm.quantizes else 0
        assert isinstance(at, int)
        with made.graph.inserting_after(made):
            new = made.graph.call_function(operator.getitem, (made, results[at]))
        new.meta = {**part.meta, "val": value(made)[results[at]]}
        set_record(new, replace(record_of(part), made_by=NAME))
        part.replace_all_uses_with(new)
        made.graph.erase_node(part)
    if norm.quantizes:
        made.graph.erase_node(norm.node)
