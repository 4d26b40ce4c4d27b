"""Writes one runnable Python file per pass that changed the graph, numbered in order:
00_captured.py, 01_rms_norm.py, ...

Each graph of a process has its own folder, graph_0, graph_1, ... The files contain no weights:
their inputs come from a seeded generator, so that equal compiles write equal bytes and all files of
a graph compute the same. The real inputs and outputs of one call may be stored in the same folder,
in recorded.pt.
"""

import itertools
import math
import operator
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, Target

from atomc.dumps.replay import RECORDED
from atomc.graph.canonical import input_name
from atomc.graph.expressions import Size, expression
from atomc.graph.node_record import record_of, step_node
from atomc.graph.op_call import kind_of
from atomc.graph.provenance import module_path
from atomc.ops.inputs import StateInput, StepInput
from atomc.ops.op import REGISTRY
from atomc.ops.op_traits import Kind

# The value of a size without a hint.
UNKNOWN_SIZE = 8
SMALL_CONSTANT = 64
TAB = 4 * " "
_numbers: dict[Path, Iterator[int]] = {}


class Dumper:
    """Writes one graph, one file per stage; does nothing without a folder."""

    def __init__(self, folder: str | None):
        self.parent = Path(folder) if folder is not None else None
        self.folder: Path | None = None
        self.stages = itertools.count()
        self.inputs: dict[str, str] = {}

    def __call__(self, gm: GraphModule, name: str) -> None:
        """Write the graph after pass `name`."""
        if self.parent is None:
            return
        if self.folder is None:
            self.folder = _next_folder(self.parent)
        for placeholder, recipe in _Inputs(gm.graph).recipes(names=self.inputs):
            self.inputs[placeholder] = recipe
        number = next(self.stages)
        text = _file_text(gm, f"{self.folder.name} after {name}", self.inputs)
        (self.folder / f"{number:02}_{name}.py").write_text(text)

    def record(self, inputs: Mapping[str, Argument], outputs: Sequence[Argument]) -> None:
        """Store the inputs and outputs of one call, without packed and prepared inputs."""
        assert self.folder is not None
        placed = tuple(
            name
            for name, recipe in self.inputs.items()
            if recipe.startswith(("Packed(", "Prepared("))
        )
        values = {name: _plain(value) for name, value in inputs.items() if name not in placed}
        torch.save(
            {"inputs": values, "outputs": [_plain(value) for value in outputs]},
            self.folder / RECORDED,
        )


def _next_folder(parent: Path) -> Path:
    """The next of graph_0, graph_1, ... in this process, with the files of an earlier process
    deleted.
    """
    number = next(_numbers.setdefault(parent.resolve(), itertools.count()))
    folder = parent / f"graph_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob("[0-9][0-9]_*.py"), *folder.glob(RECORDED)]:
        stale.unlink()
    return folder


def _plain(value: Argument) -> Argument:
    """A plain copy of a tensor, which torch.load(weights_only=True) accepts."""
    return value.detach().as_subclass(Tensor).clone() if isinstance(value, Tensor) else value


def _file_text(gm: GraphModule, title: str, inputs: dict[str, str]) -> str:
    code = _Code()
    body = code.function("forward", gm)
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    notes = {node.name: _comment(node) for node in gm.graph.find_nodes(op="placeholder")}
    lines = [f'"""{title}."""', ""]
    lines += [f"import {module}" for module in sorted(code.modules | {"atomc.ops", "torch"})]
    needs = ["Input"]
    needs += [
        kind
        for kind in ("Packed", "Prepared")
        if any(inputs[name].startswith(f"{kind}(") for name in names)
    ]
    needs += ["make"] * bool(code.constants)
    lines += ["", f"from atomc.dumps.replay import {', '.join(needs)}, run"]
    lines += ["", "# The same name gives the same numbers in every file."]
    lines += ["INPUTS = {", *(f'    "{name}": {inputs[name]},{notes[name]}' for name in names), "}"]
    if code.constants:
        lines += [
            "",
            "CONSTANTS = make({",
            *(f'    "{name}": {text},' for name, text in code.constants.items()),
            "})",
        ]
    for function in [*code.functions, body]:
        lines += ["", "", *function]
    lines += ["", "", 'if __name__ == "__main__":', "    run(forward, INPUTS)", ""]
    return "\n".join(lines)


class _Code:
    """Converts graphs to Python functions, and collects the imports and constants that they
    need.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.constants: dict[str, str] = {}
        self.functions: list[list[str]] = []

    def function(self, name: str, gm: GraphModule) -> list[str]:
        """The lines of a function that computes the graph, with dtype, shape and module as
        comments.
        """
        parameters = ", ".join(node.name for node in gm.graph.find_nodes(op="placeholder"))
        lines = [
            f"def {name}(",
            *textwrap.wrap(parameters, 120, initial_indent=TAB, subsequent_indent=TAB),
            "):",
        ]
        for node in gm.graph.nodes:
            if node.op == "output":
                lines.append(f"    return {self.spell(node.args[0])}")
            elif node.op == "get_attr":
                lines.append(f"    {node.name} = {self._attribute(gm, node)}{_comment(node)}")
            elif node.op == "call_function":
                result = f"{node.name} = " if node.users else ""
                lines.append(f"    {result}{self._call(node)}{_comment(node)}")
        return lines

    def spell(self, argument: Argument) -> str:
        """An argument as Python code."""
        match argument:
            case Node():
                return argument.name
            case list():
                return f"[{', '.join(map(self.spell, argument))}]"
            case tuple():
                return f"({', '.join(map(self.spell, argument))}{',' * (len(argument) == 1)})"
            case dict():
                return (
                    "{"
                    + ", ".join(f"{key!r}: {self.spell(value)}" for key, value in argument.items())
                    + "}"
                )
            case slice():
                return (
                    f"slice({self.spell(argument.start)}, {self.spell(argument.stop)}, "
                    f"{self.spell(argument.step)})"
                )
            case torch.device():
                return f"torch.{argument!r}".replace("meta", "cpu")
            case float() if not math.isfinite(argument):
                return f"float('{argument}')"
            case torch.SymInt():
                return str(_concrete(argument))
            case _ if callable(argument) and not isinstance(argument, torch.dtype):
                return self._name(argument)
        return repr(argument)

    def _call(self, node: Node) -> str:
        if node.target is operator.getitem:
            return f"{self.spell(node.args[0])}[{self.spell(node.args[1])}]"
        arguments = [self.spell(argument) for argument in node.args]
        arguments += [f"{key}={self.spell(argument)}" for key, argument in node.kwargs.items()]
        name = self._name(node.target)
        if "<locals>" in name or name.startswith("__main__."):  # not importable by another program
            name = f"torch.ops.atom.{record_of(node).op or name}"
        return f"{name}({', '.join(arguments)})"

    def _name(self, target: Target) -> str:
        assert callable(target), target
        if isinstance(target, torch._ops.OpOverload):
            return f"torch.ops.{target}"
        if isinstance(target, torch._ops.HigherOrderOperator):
            return f"torch.ops.higher_order.{target}"
        name = target.__qualname__ if hasattr(target, "__qualname__") else target.__name__
        if getattr(torch, name, None) is target:
            return f"torch.{name}"
        module = {"_operator": "operator"}.get(target.__module__, target.__module__)
        # The name of a reference is bound to its op. In atomc.ops, an op may hide the module of the
        # same name.
        if name in REGISTRY and REGISTRY[name].reference is target:
            module = "atomc.ops" if module.startswith("atomc.ops.") else module
            name = f"{name}.reference"
        self.modules.add(module)
        return f"{module}.{name}"

    def _attribute(self, gm: GraphModule, node: Node) -> str:
        name = str(node.target)
        constant = operator.attrgetter(name)(gm)
        if isinstance(constant, GraphModule):
            self.functions.append(self.function(name, constant))
            return name
        self.constants[name] = _constant(constant)
        return f'CONSTANTS["{name}"]'


def _constant(value: Tensor) -> str:
    plain = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not value.is_meta
    if plain and value.numel() <= SMALL_CONSTANT:
        values = str(value.tolist()).replace("inf", "float('inf')").replace("nan", "float('nan')")
        return f"torch.tensor({values}, dtype={value.dtype}{_device_argument(value)})"
    return _recipe(value)


def _device_argument(value: Tensor) -> str:
    """The device argument of a value that is not on the CPU; meta is written as CPU."""
    kind = value.device.type
    return "" if kind in ("cpu", "meta") else f', device="{kind}"'


def _recipe(value: Tensor, below: int | None = None) -> str:
    shape = tuple(_concrete(size) for size in value.shape)
    extra = (f", below={below}" if below is not None else "") + _device_argument(value)
    strides = tuple(_concrete(stride) for stride in value.stride())
    dense = torch.empty(shape, device="meta")
    if not all(
        size == 0 or size == 1 or a == b
        for size, a, b in zip(shape, strides, dense.stride(), strict=True)
    ):
        # Only the order of the dimensions matters: overlapping or padded memory is written as
        # dense.
        order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
        inverse = [order.index(dim) for dim in range(len(shape))]
        extra += f", strides={dense.permute(order).contiguous().permute(inverse).stride()}"
    return f"Input({value.dtype}, {shape}{extra})"


def _concrete(size: Size) -> int:
    """A size as a number: its hint, if it has one."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    if isinstance(hint, int):
        return hint
    symbols = expression(size).free_symbols
    return int(expression(size).subs(dict.fromkeys(symbols, UNKNOWN_SIZE)))


class _Inputs:
    """Generates the inputs of a graph."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def recipes(self, names: dict[str, str]) -> Iterator[tuple[str, str]]:
        for node in self.graph.find_nodes(op="placeholder"):
            # Each range of token counts has its own prepared weights.
            if node.name not in names or record_of(node).extra is not None:
                yield node.name, self._recipe(node)

    def _recipe(self, node: Node) -> str:
        value, record = node.meta.get("val"), record_of(node)
        if record.packed is not None:
            parts, zero_rows = record.packed
            return f"Packed({parts}{f', zero_rows={zero_rows}' if zero_rows else ''})"
        extra = record.extra
        if extra is not None and extra.kind == "prepared":
            attributes = f", attributes={extra.attributes}" if extra.attributes else ""
            return (
                f"Prepared({extra.function.__module__!r}, {extra.function.__qualname__!r}, "
                f"{extra.weights}{attributes})"
            )
        if isinstance(value, torch.SymInt):
            return str(_concrete(value))
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, int | float | bool | str) else "None"
        return self._step_recipe(node) or _recipe(
            value, _index_bound(node) if not value.is_floating_point() else None
        )

    def _step_recipe(self, node: Node) -> str | None:
        """An input that the runtime passes, for one new sequence in one block; None for an input of
        the program.
        """
        value = node.meta["val"]
        rows = step_node(self.graph, "slots") or step_node(self.graph, "input_ids")
        if rows is None or step_node(self.graph, "seq_lens") is None:  # not for the runtime
            return None
        T = _concrete(rows.meta["val"].shape[-1])
        on = _device_argument(value)
        match record_of(node).input:
            case StepInput("slots"):
                return f"torch.arange({T}{on})"
            case StepInput("block_tables"):
                return f"torch.tensor([[0]], dtype=torch.int32{on})"
            case StepInput("query_start"):
                return f"torch.tensor([0, {T}], dtype=torch.int32{on})"
            case StepInput("seq_lens"):
                return f"torch.tensor([{T}], dtype=torch.int32{on})"
            case StepInput("lora_rows"):
                return f"torch.zeros({T}, dtype=torch.int32{on})"
            case StepInput("state_slots"):
                return f"torch.tensor([0], dtype=torch.int64{on})"
            case StateInput(is_scale=True):
                return f"torch.ones(1{on})"
            case StateInput(per_sequence=True):
                return f"torch.zeros({(1, *value.shape[1:])}, dtype={value.dtype}{on})"
            case StateInput():
                return (
                    f"torch.zeros({(1, -(-T // 16) * 16, *value.shape[2:])}, "
                    f"dtype={value.dtype}{on})"
                )
        return None


_VIEWS = (
    "view",
    "reshape",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "expand",
    "_to_copy",
    "alias",
    "clone",
)


def _index_bound(node: Node) -> int | None:
    """The smallest number of rows of the tables that these integers index; None if they index
    none.
    """
    bounds = []
    for reader in node.users:
        schema = getattr(reader.target, "_schema", None)
        name = schema.name.partition("::")[2] if schema is not None else ""
        args, embedding = reader.args, torch.ops.aten.embedding.default
        if kind_of(reader) is Kind.LOOKUP or reader.target is embedding:
            table = args[1] if args[0] is node else args[0]
            bounds.append(_rows(table, 0))
        elif name in ("index_select", "gather"):
            bounds.append(_rows(args[0], args[1]))
        elif name == "index" and isinstance(args[1], list | tuple):
            bounds += [_rows(args[0], dim) for dim, index in enumerate(args[1]) if index is node]
        elif name in _VIEWS and (below := _index_bound(reader)) is not None:
            bounds.append(below)
    return min(bounds, default=None)


def _rows(table: Argument, dim: Argument) -> int:
    assert isinstance(table, Node) and isinstance(dim, int)
    return _concrete(table.meta["val"].shape[dim])


def _comment(node: Node) -> str:
    """The comment of a line: dtype[shape], then the module, or the user's name of an input."""
    where = input_name(node) if node.op == "placeholder" else module_path(node)
    parts = [_spell_value(node.meta.get("val")), where if where != node.name else ""]
    text = "  ".join(part for part in parts if part)
    return f"  # {text}" if text else ""


def _spell_value(value: Argument) -> str:
    match value:
        case Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        case tuple() | list():
            return f"({', '.join(map(_spell_value, value))})"
        case torch.SymInt():
            return f"int {value}"
    return ""
