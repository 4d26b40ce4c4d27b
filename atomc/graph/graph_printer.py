"""Prints a graph, one line per node, with its type and origin.

    add_1 = atom.add_rms_norm(linear_3, add, .weight, 1e-06) # bf16[T, 1024] model.layers.0.norm
    model.py:12

The fields after "#" are the type, the module and the line of the user's program; "-" for an empty
field. Weights have their names relative to the module.
"""

import operator
import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from atomc.graph.canonical import Value, input_name
from atomc.graph.node_record import record_of
from atomc.graph.provenance import layer_of, module_path, source_line
from atomc.graph.step_symbols import symbols_of

MAX_ARGUMENTS_LENGTH = 400
TO_THE_END = 2**62


@dataclass(frozen=True)
class NodeLine:
    """The fields of a printed node; a graph's output has the name "return". str() prints it,
    `parse` reads it.
    """

    name: str
    call: str
    type: str = ""
    path: str = ""
    source: str = ""

    def __str__(self) -> str:
        if self.name == "return":
            return f"return {self.call}"
        note = "  ".join(part or "-" for part in (self.type, self.path, self.source))
        return f"{self.name} = {self.call}  # {note}"

    @classmethod
    def parse(cls, text: str) -> "NodeLine":
        if text.startswith("return "):
            return cls("return", text.removeprefix("return "))
        left, _, note = text.partition("  # ")
        name, _, call = left.partition(" = ")
        kind, _, rest = note.partition("  ")
        path, _, source = rest.rpartition("  ")
        return cls(name, call, *("" if part == "-" else part for part in (kind, path, source)))

    @cached_property
    def layer(self) -> int | None:
        if self.call == "input":  # the path of a parameter; a number at its end is not a layer
            return layer_of(self.name.rpartition(".")[0])
        return layer_of(self.path)

    @property
    def place(self) -> str:
        """The module path relative to its layer; the whole path outside of layers."""
        return (
            re.sub(r"^(?:.*?\.)??\d+(?:\.|$)", "", self.path)
            if self.layer is not None
            else self.path
        )


def parse(text: str) -> list[NodeLine]:
    """The lines of `graph_text`."""
    return list(map(NodeLine.parse, text.splitlines()))


def graph_text(gm: GraphModule) -> str:
    """One line per node, with sizes named as in atomc.cost.cost (T, S, R) where these are known."""
    lines = [str(_line(node)) for node in gm.graph.nodes]
    sizes = {str(size): str(name) for size, name in symbols_of(gm.graph).items()}
    if sizes:
        named = re.compile(rf"\b({'|'.join(map(re.escape, sizes))})\b")
        lines = [named.sub(lambda match: sizes[match[0]], line) for line in lines]
    return "\n".join(lines)


def _line(node: Node) -> NodeLine:
    if node.op == "output":
        return NodeLine("return", _spell(node.args[0], ""))
    path = "" if node.op == "placeholder" else module_path(node)
    shown = _input(node) if node.op == "placeholder" else node.name
    return NodeLine(shown, _call(node, path), type_of(_value(node)), path, source_line(node))


def _input(node: Node) -> str:
    """The user's name of an input, without the prefix of arguments that `atomc.explain` passes
    on.
    """
    return input_name(node).removeprefix("kwargs.")


def _value(node: Node) -> Value:
    fake: Value = node.meta.get("val", node.meta.get("example_value"))
    return fake


def _call(node: Node, path: str) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"attribute {node.target}"
    if node.target is operator.getitem:
        return f"{_spell(node.args[0], path)}[{_spell(node.args[1], path)}]"
    arguments = [_spell(argument, path) for argument in node.args]
    arguments += [
        f"{key}={_spell(argument, path)}"
        for key, argument in node.kwargs.items()
        if not _is_default(key, argument)
    ]
    text = ", ".join(arguments)
    if len(text) > MAX_ARGUMENTS_LENGTH:
        text = text[:MAX_ARGUMENTS_LENGTH] + " ..."
    return f"{_name(node)}({text})"


def _is_default(key: str, argument: Argument) -> bool:
    """Whether an argument is a default for the placement of a result, or the meta device."""
    return bool(
        {"pin_memory": False, "layout": torch.strided, "device": torch.device("meta")}.get(key, ...)
        == argument
    )


def _name(node: Node) -> str:
    """ "aten.mul", "atom.rms_norm", "triton.rms_norm" for a kernel, "inline.rms_norm" for an op
    left to the glue.
    """
    if node.op == "call_method":
        return f".{node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket)
    record = record_of(node)
    if record.op:
        return f"{record.kernel or 'inline'}.{record.op}"
    return str(getattr(node.target, "__name__", node.target))


def _spell(argument: Argument, path: str) -> str:
    match argument:
        case Node():
            return _spell_node(argument, path)
        case list() | tuple():
            return f"[{', '.join(_spell(part, path) for part in argument)}]"
        case dict():
            return (
                "{"
                + ", ".join(f"{key}: {_spell(part, path)}" for key, part in argument.items())
                + "}"
            )
        case slice():
            return ":".join(
                "" if x is None else _spell(x, path)
                for x in (argument.start, argument.stop, argument.step)
            )
        case torch.dtype():
            return short(argument)
        case int() if argument >= TO_THE_END:
            return "end"
        case str():
            return repr(argument)
    return str(getattr(argument, "__name__", argument))


def _spell_node(node: Node, path: str) -> str:
    """The name of a node; of an input in the module at `path` or below only what follows the
    path.
    """
    if isinstance(_value(node), torch.SymInt):
        return str(_value(node))
    if node.op != "placeholder":
        return node.name
    name = _input(node)
    outside, separator, below = name.partition(f"{path}.") if path else ("", "", "")
    return f".{below}" if separator and (not outside or outside.endswith(".")) else name


def type_of(value: Value) -> str:
    """bf16[T, 1024]; a tuple of types for several results; "int" and the value for a size."""
    match value:
        case Tensor():
            return f"{short(value.dtype)}[{', '.join(map(str, value.shape))}]"
        case tuple() | list():
            return f"({', '.join(map(type_of, value))})"
        case torch.SymInt() | int():
            return f"int {value}"
        case torch.SymFloat() | float():
            return "float"
    return ""


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short(dtype: torch.dtype) -> str:
    """bf16, f32, i64, f8_e4m3fn."""
    name = str(dtype).removeprefix("torch.")
    for long, letter in sorted(_SHORT.items(), key=lambda item: -len(item[0])):
        if name.startswith(long) and name[len(long) : len(long) + 1].isdigit():
            return letter + name[len(long) :]
    return name
