"""A graph as text for people: a line a node, with what it is and where it comes from behind it.

    add_1 = atom.add_rms_norm(linear_3, add, .weight, 1e-06)  # bf16[T, 1024]  model.layers.0.norm  model.py:12

The three fields behind the "#" are the type, the module and the line of the user's program; "-" where there is none.
Weights are called by their names below the module.
"""

import operator
import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.cost import symbols_of
from atomc.graph.canonical import input_name
from atomc.graph.provenance import module_path, source_line

MOST_ARGUMENTS = 400
TO_THE_END = 2**62


def listing(gm: GraphModule) -> str:
    """The lines of a graph, its inputs first and what it returns last; sizes as in formulas of cost, T, S and R."""
    lines = [_line(node) for node in gm.graph.nodes]
    sizes = {str(size): str(name) for size, name in symbols_of(gm.graph).items()}
    if sizes:
        named = re.compile(rf"\b({'|'.join(map(re.escape, sizes))})\b")
        lines = [named.sub(lambda found: sizes[found[0]], line) for line in lines]
    return "\n".join(lines)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_spell(node.args[0], '')}"
    path = "" if node.op == "placeholder" else module_path(node)
    shown = _input(node) if node.op == "placeholder" else node.name
    note = "  ".join([type_of(_value(node)) or "-", path or "-", source_line(node) or "-"])
    return f"{shown} = {_call(node, path)}  # {note}"


def _input(node: Node) -> str:
    """What the user calls it, also where `atomc.explain` passed it on."""
    return input_name(node).removeprefix("kwargs.")


def _value(node: Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _call(node: Node, path: str) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"attribute {node.target}"
    if node.target is operator.getitem:
        return f"{_spell(node.args[0], path)}[{_spell(node.args[1], path)}]"
    given = [_spell(argument, path) for argument in node.args]
    given += [f"{key}={_spell(argument, path)}" for key, argument in node.kwargs.items() if not _is_noise(key, argument)]
    text = ", ".join(given)
    return f"{_name(node)}({text if len(text) <= MOST_ARGUMENTS else text[:MOST_ARGUMENTS] + ' ...'})"


def _is_noise(key: str, argument: Any) -> bool:
    """Where things lie that are on meta or lie as usual."""
    return bool({"pin_memory": False, "layout": torch.strided, "device": torch.device("meta")}.get(key, ...) == argument)


def _name(node: Node) -> str:
    """"aten.mul", "atom.rms_norm", "triton.rms_norm" for a kernel, "inline.rms_norm" for a meaning left to the glue."""
    if node.op == "call_method":
        return f".{node.target}"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket)
    if "kernel" in node.meta and "op" in node.meta:
        return f"{node.meta['kernel']}.{node.meta['op']}"
    if "op" in node.meta:
        return f"inline.{node.meta['op']}"
    return str(getattr(node.target, "__name__", node.target))


def _spell(argument: Any, path: str) -> str:
    match argument:
        case Node() if isinstance(_value(argument), torch.SymInt):
            return str(_value(argument))
        case Node() if argument.op == "placeholder":
            name = _input(argument)
            outside, found, below = name.partition(f"{path}.") if path else ("", "", "")
            return f".{below}" if found and (not outside or outside.endswith(".")) else name
        case Node():
            return argument.name
        case list() | tuple():
            return f"[{', '.join(_spell(part, path) for part in argument)}]"
        case dict():
            return "{" + ", ".join(f"{key}: {_spell(part, path)}" for key, part in argument.items()) + "}"
        case slice():
            return ":".join("" if x is None else _spell(x, path) for x in (argument.start, argument.stop, argument.step))
        case torch.dtype():
            return short(argument)
        case int() if argument >= TO_THE_END:
            return "end"
        case str():
            return repr(argument)
        case _ if hasattr(argument, "__name__"):
            return str(argument.__name__)
    return str(argument)


def type_of(value: Any) -> str:
    """bf16[T, 1024]; of several results each; of a size "int"."""
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
        if name.startswith(long) and name[len(long):len(long) + 1].isdigit():
            return letter + name[len(long):]
    return name
