"""The canonical form of ATen calls: equal for different calls that compute the same.

chunk, split and slice become `slice`; `x * x` and `pow(x, 2)` become `square`; transpose, t and
permute become `permute`; reshape and unsqueeze become `view`. Dimensions count from the end, and
defaults are filled in. The graph itself is not changed.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import FunctionSchema, Tensor
from torch.fx import Node
from torch.fx.node import Argument, Target

from atomc.graph.expressions import expression
from atomc.graph.node_record import record_of
from atomc.graph.sizes import known_equal
from atomc.ops.formats import HALVES
from atomc.ops.op import op_of

COMMUTATIVE = frozenset(
    {"add", "mul", "maximum", "minimum", "eq", "ne", "bitwise_and", "bitwise_or"}
)
VIEWS = frozenset({"view", "clone"})
# Ops that occur in most graphs: they alone do not indicate that a pattern is near.
GENERIC = frozenset({
    "add", "mul", "sub", "div", "neg", "view", "permute", "slice", "cast", "to", "expand",
    "getitem", "cat", "clone", "mean", "sum", "square", "pow", "stack",
})  # fmt: skip
CallKey = tuple[Target, tuple[Argument, ...], dict[str, Argument], tuple[Argument, ...]]
SPLITS = frozenset({"split", "split_with_sizes"})
_TO_THE_END = 2**62


@dataclass(frozen=True)
class Capture:
    """A placeholder in a traced pattern for a number, string, dtype or flag of the matched site.
    among: the allowed values; () for any.
    """

    name: str
    among: "tuple[Attr, ...]" = ()


# What a node has as fake value: a tensor, a size, or several of these.
Value: TypeAlias = (
    "Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | float | Sequence[Value] | None"
)
# An argument that is not a tensor; lists are tuples, and sizes that are nodes their values.
# In a traced pattern, captures and the values of its example stand for attributes, too.
Attr: TypeAlias = (
    "Argument | Capture | Tensor | Callable[..., Tensor | tuple[Tensor, ...]] | tuple[Attr, ...]"
)


_CACHED_CALL = "atomc.call"


@dataclass
class Call:
    """A canonical call. operands: the tensors that it reads, lists flattened; attrs: the other
    arguments by their names in the schema.
    """

    op: str
    operands: list[Node]
    attrs: dict[str, Attr]

    def orders(self) -> list[list[Node]]:
        """The orders of the operands that give the same result."""
        both = self.op in COMMUTATIVE and len(self.operands) == 2
        return [self.operands, self.operands[::-1]] if both else [self.operands]


def value(node: Node) -> Any:
    """The fake value of a node (a Value)."""
    return node.meta.get("val")


def dim_of(attr: Attr) -> int:
    """An attribute that is a dimension."""
    assert isinstance(attr, int)
    return attr


def dims_of(attr: Attr) -> tuple[int, ...]:
    """An attribute that is several dimensions."""
    assert isinstance(attr, tuple)
    return tuple(map(dim_of, attr))


def names_of(attr: Attr) -> tuple[str, ...]:
    """An attribute that is several names, such as `given`; () for None."""
    return tuple(name for name in attr if isinstance(name, str)) if isinstance(attr, tuple) else ()


def call(node: Node) -> Call:
    """The canonical call of a node, cached in its metadata until its target or arguments change."""
    # A part of a split is a slice of the tensor that is split.
    source = node.args[0] if node.target is operator.getitem else None
    split = source.args if isinstance(source, Node) else ()
    key: CallKey = (node.target, node.args, dict(node.kwargs), split)
    # Metadata is copied with a node, so the cached call says whose it is.
    cached: tuple[Node, CallKey, Call] | None = node.meta.get(_CACHED_CALL)
    if cached is None or cached[0] is not node or cached[1] != key:
        cached = node.meta[_CACHED_CALL] = (node, key, _call(node))
    return cached[2]


def _call(node: Node) -> Call:
    if node.op != "call_function":
        return Call(node.op, [], {})
    if node.target is operator.getitem:
        return _getitem(node)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return Call(str(node.target), list(node.all_input_nodes), {})
    written = _schema_call(node, schema)
    canonical = _CANONICAL_FORMS.get(written.op)
    return canonical(node, written) if canonical is not None else written


def _schema_call(node: Node, schema: FunctionSchema) -> Call:
    """The call as written, with dimensions from the end."""
    operands: list[Node] = []
    attrs: dict[str, Attr] = {}
    names = []
    for name, argument in _arguments(node, schema):
        parts = argument if isinstance(argument, list | tuple) else [argument]
        if any(
            isinstance(part, Node) and isinstance(value(part), Tensor | tuple | list)
            for part in parts
        ):
            operands += [part for part in parts if isinstance(part, Node)]
            names.append(name)
            if None in parts:  # which dimensions an index leaves as they are
                attrs[name] = tuple(part is not None for part in parts)
        elif argument is not None and name not in ("device", "pin_memory"):
            attrs[name] = _attr(argument)
    if any(
        isinstance(argument.type, torch.OptionalType) and "Tensor" in str(argument.type)
        for argument in schema.arguments
    ):
        attrs["given"] = tuple(names)
    written = Call(schema.name.removeprefix("aten::"), operands, attrs)
    attrs.update(_dims_from_end(written))
    return written


def _arguments(node: Node, schema: FunctionSchema) -> Iterator[tuple[str, Argument]]:
    """Every argument by name, with defaults."""
    ours = op_of(node.target)
    for i, argument in enumerate(schema.arguments):
        if i < len(node.args) and not argument.kwarg_only:
            yield argument.name, node.args[i]
        else:
            # The default of a dtype in a schema is only a number.
            default = (
                ours.signature.parameters[argument.name].default if ours else argument.default_value
            )
            yield argument.name, node.kwargs.get(argument.name, default)


def _attr(argument: Argument) -> Attr:
    """A size that is a node becomes its symbolic value."""
    if isinstance(argument, Node):
        size: torch.SymInt = value(argument)
        return size
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        return tuple(map(_attr, argument))
    assert not isinstance(argument, (Mapping, slice))
    return argument


def _rank(operands: list[Node]) -> int:
    first = value(operands[0]) if operands else None
    return first.dim() if isinstance(first, Tensor) else 0


def _count_from_end(dim: int, rank: int) -> int:
    return dim - rank if dim >= 0 else dim


def _dims_from_end(written: Call) -> dict[str, Attr]:
    rank = _rank(written.operands) + (written.op == "stack")
    names = (
        ("dim", "dims", "dim0", "dim1") if written.op != "permute" else ()
    )  # the order of its dims matters
    written_dims = {name: written.attrs[name] for name in names if name in written.attrs}
    return {
        name: tuple(sorted(_count_from_end(d, rank) for d in dims_of(dims)))
        if isinstance(dims, tuple)
        else _count_from_end(dim_of(dims), rank)
        for name, dims in written_dims.items()
    }


def _getitem(node: Node) -> Call:
    source, index = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(index, int)
    if call(source).op not in SPLITS:
        return Call("getitem", [source], {"index": index})
    x, parts = source.args[0], value(source)
    assert isinstance(x, Node)
    dim = source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    dim = _count_from_end(dim, value(x).dim())
    start: int | torch.SymInt = 0
    for part in parts[:index]:
        start = start + part.shape[dim]
    end = None if index == len(parts) - 1 else start + parts[index].shape[dim]
    return Call("slice", [x], {"dim": dim, "start": start, "end": end, "step": 1})


def _cast(node: Node, written: Call) -> Call:
    operands, attrs = written.operands, written.attrs
    if not operands:  # of a number, which vmap converts to a tensor
        return written
    same_place = value(node).device == value(operands[0]).device
    plain = attrs.get("memory_format") in (None, torch.preserve_format)
    if same_place and plain:
        return Call("cast", operands, {"dtype": value(node).dtype})
    moved: dict[str, Attr] = {"dtype": value(node).dtype, "device": value(node).device}
    moved |= {} if plain else {"memory_format": attrs["memory_format"]}
    return Call("to", operands, moved)


def _view(node: Node, written: Call) -> Call:
    if "dtype" in written.attrs:  # a reinterpretation of the bytes
        return Call("view_dtype", written.operands, {"dtype": value(node).dtype})
    return Call("view", written.operands, {"shape": tuple(value(node).shape)})


def _expand(node: Node, written: Call) -> Call:
    return Call("expand", written.operands, {"shape": tuple(value(node).shape)})


def _permute(_: Node, written: Call) -> Call:
    """The order of dimensions from the end, without leading ones that keep their place, so that it
    is independent of the rank.
    """
    rank = _rank(written.operands)
    order = list(range(-rank, 0))
    if written.op == "permute":
        order = [_count_from_end(d, rank) for d in dims_of(written.attrs["dims"])]
    elif rank > 1:
        a, b = (
            (dim_of(written.attrs["dim0"]), dim_of(written.attrs["dim1"]))
            if written.op == "transpose"
            else (-2, -1)
        )
        order[a], order[b] = order[b], order[a]
    while order and order[0] == -len(order):
        order.pop(0)
    return Call("permute", written.operands, {"dims": tuple(order)})


def _slice(_: Node, written: Call) -> Call:
    attrs, rank = written.attrs, _rank(written.operands)
    dim = attrs.get("dim", -rank)
    end, size = attrs.get("end"), value(written.operands[0]).shape[dim]
    if end is None or (isinstance(end, int) and end > _TO_THE_END) or known_equal(end, size):
        end = None
    start = attrs.get("start", 0)
    if isinstance(start, int) and start < 0 and not isinstance(size, torch.SymInt):
        start += size
    return Call(
        "slice",
        written.operands,
        {"dim": dim, "start": start, "end": end, "step": attrs.get("step", 1)},
    )


def _square(_: Node, written: Call) -> Call:
    return Call("square", written.operands[:1], {})


def _pow(node: Node, written: Call) -> Call:
    return _square(node, written) if written.attrs.get("exponent") == 2 else written


def _mul(node: Node, written: Call) -> Call:
    same = len(written.operands) == 2 and written.operands[0] is written.operands[1]
    return _square(node, written) if same else written


def _grouped_mm(_: Node, written: Call) -> Call:
    """The op of transformers that stands in for torch's where that has no kernel."""
    return Call("_grouped_mm", written.operands, {"given": ("self", "mat2", "offs")})


# By name in the schema: (node, its call as written) -> the canonical call.
_CANONICAL_FORMS: dict[str, Callable[[Node, Call], Call]] = {
    "_to_copy": _cast,
    "prims::convert_element_type": _cast,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "unsqueeze": _view,
    "squeeze": _view,
    "expand": _expand,
    "transpose": _permute,
    "t": _permute,
    "permute": _permute,
    "slice": _slice,
    "square": _square,
    "pow": _pow,
    "mul": _mul,
    "clone": lambda node, written: Call("clone", written.operands, {}),
    "transformers::grouped_mm_fallback": _grouped_mm,
}


def readers(node: Node) -> list[Node]:
    """The nodes that read a node. A split is replaced by its parts, which are slices."""
    nodes: list[Node] = []
    for user in node.users:
        nodes += user.users if call(user).op in SPLITS else [user]
    return nodes


def only_reader(node: Node) -> Node | None:
    """The reader of a node with one reader."""
    nodes = readers(node)
    return nodes[0] if len(nodes) == 1 else None


def factor(node: Node) -> float | None:
    """The constant by which a node multiplies its operand, or None."""
    here = call(node)
    by = here.attrs.get("other")
    if len(here.operands) != 1 or not isinstance(by, int | float) or "rounding_mode" in here.attrs:
        return None
    if here.op == "mul":
        return float(by)
    return 1 / by if here.op == "div" and by else None


def uncast(node: Node, dtypes: Sequence[torch.dtype] = HALVES) -> Node | None:
    """The operand of a cast to fp32 from one of these dtypes."""
    here = call(node)
    if here.op != "cast" or value(node).dtype != torch.float32:
        return None
    return here.operands[0] if value(here.operands[0]).dtype in dtypes else None


def keeps_last_dim(node: Node) -> bool:
    """Whether a view keeps the last dimension, so that a row-wise op may be moved across it."""
    source = value(call(node).operands[0])
    return bool(
        source.dim() and value(node).dim() and known_equal(value(node).shape[-1], source.shape[-1])
    )


def spell(node: object, of_pattern: bool = False) -> str:
    """A short text for a node, without defaults: `mean(dim=(-1,), keepdim=True)`. of_pattern: only
    attributes that are constant in the pattern.
    """
    if not isinstance(node, Node):
        return repr(node)
    if node.op != "call_function":
        return f"input {input_name(node)}"
    canonical = call(node)
    if canonical.op == "getitem":
        return f"result {canonical.attrs['index']} of {spell(canonical.operands[0], of_pattern)}"
    defaults = _defaults(node, canonical.op)
    attrs = {
        name: attr
        for name, attr in canonical.attrs.items()
        if name != "given"
        and not (name in defaults and _is_default(attr, defaults[name]))
        and not (of_pattern and _decided_by_site(attr))
    }
    op = canonical.op.replace("atom::", "")
    return (
        f"{op}({', '.join(f'{name}={_spell_attr(attr)}' for name, attr in attrs.items())})"
        if attrs
        else op
    )


def _defaults(node: Node, op: str) -> dict[str, Attr]:
    if op == "slice":
        return {"end": None, "step": 1}
    schema = getattr(node.target, "_schema", None)
    return (
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        if schema is not None
        else {}
    )


def input_name(placeholder: Node) -> str:
    """The user's name of an input: the name of the argument, or the path of the parameter."""
    source = record_of(placeholder).source
    if not source:
        return placeholder.name
    keys = [
        key
        for key in re.findall(r"\w+", source)
        if key not in ("L", "G", "_modules", "_parameters", "_buffers")
    ]
    return ".".join(keys[1:] if len(keys) > 1 and keys[0] == "self" else keys)


def _decided_by_site(attr: Attr) -> bool:
    return isinstance(attr, Capture | torch.SymInt) or (
        isinstance(attr, tuple) and any(map(_decided_by_site, attr))
    )


def _is_default(attr: Attr, default: Attr) -> bool:
    return (
        type(attr) is type(default) and not isinstance(attr, torch.SymInt) and bool(attr == default)
    )


def _spell_attr(attr: Attr) -> str:
    if isinstance(attr, torch.SymInt):
        return str(expression(attr))
    return str(attr).removeprefix("torch.")
