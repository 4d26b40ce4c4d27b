"""One spelling per idea: what an ATen node says, independent of how it was written.

chunk, split and slice are one `slice`; `x * x` and `pow(x, 2)` one `square`; transpose, t and permute one `permute`;
reshape and unsqueeze one `view`; dimensions count from the end; defaults are filled in. The graph itself is not changed.
"""

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from atomc.graph.expressions import expression
from atomc.graph.sizes import known_equal
from atomc.op import op_of

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "eq", "ne", "bitwise_and", "bitwise_or"})
VIEWS = frozenset({"view", "clone"})
# Ops that many ideas share: a pattern is not looked for because of these alone.
GENERIC = frozenset({"add", "mul", "sub", "div", "neg", "view", "permute", "slice", "cast", "to", "expand", "getitem",
                     "cat", "clone", "mean", "sum", "square", "pow", "stack"})  # fmt: skip
_SPLITS = frozenset({"aten::split", "aten::split_with_sizes"})
_TO_THE_END = 2**62


@dataclass(frozen=True)
class Capture:
    """Stands in a traced pattern for a number, string, dtype or flag that the site decides; `among`: one of these only."""

    name: str
    among: tuple[Any, ...] = ()


@dataclass
class Call:
    """op: its name; operands: the tensors it reads, lists flattened; attrs: everything else by schema name."""

    op: str
    operands: list[Node]
    attrs: dict[str, Any]

    def orders(self) -> list[list[Node]]:
        """The orders in which the operands mean the same."""
        both = self.op in COMMUTATIVE and len(self.operands) == 2
        return [self.operands, self.operands[::-1]] if both else [self.operands]


def value(node: Node) -> Any:
    """The fake value (tensor, size or tuple of these) of a node."""
    return node.meta.get("val")


def call(node: Node) -> Call:
    """The canonical call of a node; remembered on the node until its target or arguments change."""
    key: tuple[Any, ...] = (node.target, node.args, dict(node.kwargs))
    if node.target is operator.getitem:  # a part of a split is a slice of what is split
        key = (*key, node.args[0].args)  # type: ignore[union-attr]
    known = node.meta.get("canonical")
    if known is None or known[0] != key:
        known = node.meta["canonical"] = (key, _call(node))
    return known[1]


def _call(node: Node) -> Call:
    if node.op != "call_function":
        return Call(node.op, [], {})
    if node.target is operator.getitem:
        return _getitem(node)
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return Call(str(node.target), list(node.all_input_nodes), {})
    op, operands, attrs = _by_schema(node, schema)
    rank = _rank(operands)
    if op == "stack":
        rank += 1
    for name in ("dim", "dims", "dim0", "dim1"):
        if name in attrs and op != "permute":
            dims = attrs[name]
            attrs[name] = (tuple(sorted(_from_end(d, rank) for d in dims)) if isinstance(dims, tuple)
                           else _from_end(dims, rank))
    if op in ("_to_copy", "prims::convert_element_type"):
        return _cast(node, operands, attrs)
    if op == "view" and "dtype" in attrs:  # the same bytes read as other numbers
        return Call("view_dtype", operands, {"dtype": value(node).dtype})
    if op in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand"):
        return Call("expand" if op == "expand" else "view", operands, {"shape": tuple(value(node).shape)})
    if op in ("transpose", "t", "permute"):
        return Call("permute", operands, {"dims": _permutation(op, attrs, rank)})
    if op == "slice":
        return Call("slice", operands, _slice(operands[0], attrs, rank))
    if (op == "pow" and attrs.get("exponent") == 2) or op == "square":
        return Call("square", operands[:1], {})
    if op == "mul" and len(operands) == 2 and operands[0] is operands[1]:
        return Call("square", operands[:1], {})
    if op == "clone":
        return Call("clone", operands, {})
    return Call(op, operands, attrs)


def _by_schema(node: Node, schema: Any) -> tuple[str, list[Node], dict[str, Any]]:
    operands: list[Node] = []
    attrs: dict[str, Any] = {}
    given = []
    ours = op_of(node.target)
    for i, argument in enumerate(schema.arguments):
        # A schema knows the default of a dtype by its number only.
        default = ours.signature.parameters[argument.name].default if ours else argument.default_value
        found = (node.args[i] if i < len(node.args) and not argument.kwarg_only
                 else node.kwargs.get(argument.name, default))
        parts = found if isinstance(found, list | tuple) else [found]
        if any(isinstance(part, Node) and isinstance(value(part), Tensor | tuple | list) for part in parts):
            operands += [part for part in parts if isinstance(part, Node)]
            given.append(argument.name)
        elif isinstance(found, list | tuple):
            attrs[argument.name] = tuple(_number(part) for part in found)
        elif found is not None:
            attrs[argument.name] = _number(found)
    if any(isinstance(argument.type, torch.OptionalType) and "Tensor" in str(argument.type)
           for argument in schema.arguments):
        attrs["given"] = tuple(given)
    return schema.name.removeprefix("aten::"), operands, attrs


def _number(found: Any) -> Any:
    """A size that is a node becomes its symbolic value."""
    return value(found) if isinstance(found, Node) else found


def _rank(operands: list[Node]) -> int:
    first = value(operands[0]) if operands else None
    return first.dim() if isinstance(first, Tensor) else 0


def _from_end(dim: int, rank: int) -> int:
    return dim - rank if dim >= 0 else dim


def _getitem(node: Node) -> Call:
    source, index = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(index, int)
    schema = getattr(source.target, "_schema", None)
    if schema is None or schema.name not in _SPLITS:
        return Call("getitem", [source], {"index": index})
    x, parts = source.args[0], value(source)
    assert isinstance(x, Node)
    dim = _from_end(source.args[2] if len(source.args) > 2 else source.kwargs.get("dim", 0), value(x).dim())  # type: ignore[arg-type]
    start: Any = 0
    for part in parts[:index]:
        start = start + part.shape[dim]
    end = None if index == len(parts) - 1 else start + parts[index].shape[dim]
    return Call("slice", [x], {"dim": dim, "start": start, "end": end, "step": 1})


def _cast(node: Node, operands: list[Node], attrs: dict[str, Any]) -> Call:
    same_place = value(node).device == value(operands[0]).device
    plain = attrs.get("memory_format") in (None, torch.preserve_format)
    if same_place and plain:
        return Call("cast", operands, {"dtype": value(node).dtype})
    made = {"dtype": value(node).dtype, "device": value(node).device}
    return Call("to", operands, made if plain else {**made, "memory_format": attrs["memory_format"]})


def _permutation(op: str, attrs: dict[str, Any], rank: int) -> tuple[int, ...]:
    """The order of dimensions from the end, without the leading ones that stay: then the rank does not matter."""
    order = list(range(-rank, 0))
    if op == "permute":
        order = [_from_end(d, rank) for d in attrs["dims"]]
    elif rank > 1:
        a, b = (attrs["dim0"], attrs["dim1"]) if op == "transpose" else (-2, -1)
        order[a], order[b] = order[b], order[a]
    while order and order[0] == -len(order):
        order.pop(0)
    return tuple(order)


def _slice(x: Node, attrs: dict[str, Any], rank: int) -> dict[str, Any]:
    dim = attrs.get("dim", -rank)
    end, size = attrs.get("end"), value(x).shape[dim]
    if end is None or (isinstance(end, int) and end > _TO_THE_END) or known_equal(end, size):
        end = None
    start = attrs.get("start", 0)
    if isinstance(start, int) and start < 0 and not isinstance(size, torch.SymInt):
        start += size
    return {"dim": dim, "start": start, "end": end, "step": attrs.get("step", 1)}


def readers(node: Node) -> list[Node]:
    """Who reads a node. In the place of a split stand its parts, which are slices of what is split."""
    found: list[Node] = []
    for user in node.users:
        split = getattr(getattr(user.target, "_schema", None), "name", "") in _SPLITS
        found += user.users if split else [user]
    return found


def keeps_last_dim(node: Node) -> bool:
    """Whether a view leaves the last dimension as it is, so that a row-wise op may move across it."""
    source = value(call(node).operands[0])
    return bool(source.dim() and value(node).dim() and known_equal(value(node).shape[-1], source.shape[-1]))


def spell(node: object, of_pattern: bool = False) -> str:
    """A node in few words, without defaults: `mean(dim=(-1,), keepdim=True)`. Of a pattern's node only what is constant."""
    if not isinstance(node, Node):
        return repr(node)
    if node.op != "call_function":
        return f"input {input_name(node)}"
    made = call(node)
    if made.op == "getitem":
        return f"result {made.attrs['index']} of {spell(made.operands[0], of_pattern)}"
    schema = getattr(node.target, "_schema", None)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()} if schema is not None else {}
    attrs = {name: attr for name, attr in made.attrs.items()
             if name != "given" and not (name in defaults and _is_default(attr, defaults[name]))}  # fmt: skip
    if made.op == "slice":  # to the end, and every column
        attrs = {name: attr for name, attr in attrs.items() if (name, attr) not in (("end", None), ("step", 1))}
    if of_pattern:
        attrs = {name: attr for name, attr in attrs.items() if not _decided_by_site(attr)}
    op = made.op.replace("atom::", "")
    return f"{op}({', '.join(f'{name}={_spell_attr(attr)}' for name, attr in attrs.items())})" if attrs else op


def input_name(placeholder: Node) -> str:
    """What the user calls an input: the argument's name, or the path of the parameter."""
    source = placeholder.meta.get("source")
    if not source:
        return placeholder.name
    keys = [key for key in re.findall(r"\w+", source) if key not in ("L", "G", "_modules", "_parameters", "_buffers")]
    return ".".join(keys[1:] if len(keys) > 1 and keys[0] == "self" else keys)


def _decided_by_site(attr: Any) -> bool:
    return isinstance(attr, Capture | torch.SymInt) or (isinstance(attr, tuple) and any(map(_decided_by_site, attr)))


def _is_default(attr: Any, default: Any) -> bool:
    return type(attr) is type(default) and not isinstance(attr, torch.SymInt) and bool(attr == default)


def _spell_attr(attr: Any) -> str:
    if isinstance(attr, torch.SymInt):
        return str(expression(attr))
    return str(attr).removeprefix("torch.")
