"""Compares dumps by ops, attributes, shapes, modules and data flow, ignoring the names of nodes.

Two dumps with the same graphs are equal, independent of the version, rank or machine that wrote
them. Symbols of sizes are compared by order of appearance.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from atomc.graph.provenance import layer_of
from atomc.report.records import grouped_by, spans
from atomc.report.render.table import collapsed

_STAGE = re.compile(r"(\d+)_(\w+)\.py")
_SYMBOL = re.compile(r"\b[su]\d+\b")
_VALUE = re.compile(r"^(\w+\[.*?\]|\(.*\)|int .*)$")
MAX_LINES = 40


@dataclass(frozen=True)
class DumpLine:
    """One node of a dumped graph. says: its text without names; reads: numbers of lines, or names
    of inputs.
    """

    op: str
    says: str
    path: str
    reads: tuple[int | str, ...]

    def text(self) -> str:
        return f"{self.says}  {self.path}".rstrip()


def differences(first: Path, second: Path, *, every_stage: bool = False) -> list[str]:
    """The differences of two dumps, two graphs of dumps or two files, one line each; [] if they
    compute the same.

    every_stage  include the details of stages after the first one that differs
    Raises ValueError for anything that is not a dump.
    """
    if first.is_file() and second.is_file():
        return _file_changes(first, second)
    a, b = _graphs(first), _graphs(second)
    lines = [f"{len(b)} graphs instead of {len(a)}"] if len(a) != len(b) else []
    for number, (left, right) in enumerate(zip(a, b, strict=False)):
        lines += [
            f"graph {number}: {line}" if len(a) > 1 else line
            for line in _graph_changes(left, right, every_stage)
        ]
    return lines


def _graphs(folder: Path) -> list[dict[str, Path]]:
    """The stages of each graph, by name; a pass that ran several times is numbered."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder, or the other one is a file: give two dumps, two graphs "
            "or two files"
        )
    graphs = sorted(
        (int(match[1]), sub)
        for sub in folder.iterdir()
        if (match := re.fullmatch(r"graph_(\d+)", sub.name))
    )
    stages = [_stages(sub) for _, sub in graphs] or [_stages(folder)]
    if not all(stages):
        raise ValueError(
            f"{folder} does not contain a dump: expected graph_0/00_captured.py and so on"
        )
    return stages


def _stages(folder: Path) -> dict[str, Path]:
    stages: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        name = _STAGE.fullmatch(file.name)
        if name:
            times = sum(path.partition(" ")[0] == name[2] for path in stages)
            stages[f"{name[2]} {times + 1}" if times else name[2]] = file
    return stages


def _graph_changes(a: Mapping[str, Path], b: Mapping[str, Path], every_stage: bool) -> list[str]:
    changes = [f"{name} changed only the first" for name in a if name not in b]
    changes += [f"{name} changed only the second" for name in b if name not in a]
    later: list[str] = []
    shown = False
    for name in a:
        lines = _file_changes(a[name], b[name]) if name in b else []
        if lines and shown and not every_stage:
            later.append(name)
        elif lines:
            shown = True
            changes += [f"after {name}:", *(f"  {line}" for line in lines)]
    return changes + ([f"later stages also differ: {', '.join(later)}"] if later else [])


def _file_changes(first: Path, second: Path) -> list[str]:
    a, b = _read(first), _read(second)
    changes: list[str] = []
    for name in [*a, *(name for name in b if name not in a)]:
        lines = _line_changes(a.get(name, []), b.get(name, []))
        changes += lines if name in ("INPUTS", "forward") else [f"{name}: {line}" for line in lines]
    return changes


# Reading a file


def _read(file: Path) -> dict[str, list[DumpLine]]:
    """The inputs and the functions of a dumped file."""
    text = file.read_text(encoding="utf-8")
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{file} is not a dump: {error}") from error
    source = text.splitlines()
    symbols: dict[str, str] = {}
    tables = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    if "INPUTS" not in tables or not functions:
        raise ValueError(f"{file} is not a dump: it needs INPUTS and forward")
    constants = (
        _entries(tables["CONSTANTS"].args[0])  # type: ignore[attr-defined]
        if isinstance(tables.get("CONSTANTS"), ast.Call)
        else {}
    )
    inputs: dict[str, DumpLine] = {}
    for name, value in _entries(tables["INPUTS"]).items():
        inputs[name] = _input(name, value, _comment(value, source, symbols), inputs)
    parts = {"INPUTS": sorted(inputs.values(), key=DumpLine.text)}
    names = {name: line.path for name, line in inputs.items()}
    for function in functions:
        parts[function.name] = list(_lines(function, source, symbols, constants, names))
    return parts


def _entries(table: ast.expr) -> dict[str, ast.expr]:
    if not isinstance(table, ast.Dict):
        return {}
    return {
        key.value: value
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


def _input(
    name: str, value: ast.expr, comment: tuple[str, str], earlier: Mapping[str, DumpLine]
) -> DumpLine:
    """An input is identified by its name in the user's program; a packed or prepared one, by the
    names of its parts.
    """
    shape, path = comment
    text = ast.unparse(value)
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("Packed", "Prepared")
    ):
        *rest, parts = [ast.literal_eval(argument) for argument in value.args]
        text = path = ", ".join(
            [*rest, *(earlier[part].path for part in parts if part is not None)]
        )
    return DumpLine("input", f"input {text}  {shape}".rstrip(), path or name, ())


def _lines(
    function: ast.FunctionDef,
    source: Sequence[str],
    symbols: dict[str, str],
    constants: Mapping[str, ast.expr],
    inputs: Mapping[str, str],
) -> Iterator[DumpLine]:
    values: dict[str, int | str] = {
        argument.arg: inputs.get(argument.arg, argument.arg) for argument in function.args.args
    }
    for i, statement in enumerate(function.body):
        shape, path = _comment(statement, source, symbols)
        value = (
            statement.value if isinstance(statement, ast.Assign | ast.Expr | ast.Return) else None
        )
        if value is None:
            continue
        anonymous = _WithoutNames(values, constants)
        text = ast.unparse(anonymous.visit(value))
        if isinstance(statement, ast.Return):
            text = f"return {text}"
        op = text.partition("(")[0].removeprefix("torch.ops.").removesuffix(".default")
        text = text.replace("torch.ops.", "").replace(".default(", "(")
        yield DumpLine(op, f"{text}  {shape}".rstrip(), path, tuple(anonymous.read))
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values[statement.targets[0].id] = i


class _WithoutNames(ast.NodeTransformer):
    """Replaces results of earlier lines by _, and constants by their values."""

    def __init__(self, values: Mapping[str, int | str], constants: Mapping[str, ast.expr]):
        self.values, self.constants = values, constants
        self.read: list[int | str] = []

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.values:
            return node
        self.read.append(self.values[node.id])
        return ast.Name("_")

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if (
            isinstance(node.value, ast.Name)
            and node.value.id == "CONSTANTS"
            and isinstance(node.slice, ast.Constant)
        ):
            return self.constants.get(str(node.slice.value), node)
        self.generic_visit(node)
        return node


def _comment(
    node: ast.expr | ast.stmt, source: Sequence[str], symbols: dict[str, str]
) -> tuple[str, str]:
    """(dtype and shape, module) from the comment after a line."""
    line = (
        source[(node.end_lineno or 1) - 1]
        .encode()[node.end_col_offset or 0 :]
        .decode()
        .lstrip(",")
        .strip()
    )
    parts = [part.strip() for part in line.removeprefix("#").split("  ") if part.strip()]
    shape = parts.pop(0) if parts and _VALUE.match(parts[0]) else ""
    shape = _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"s{len(symbols)}"), shape)
    return shape, "  ".join(parts)


# Comparing


def _line_changes(a: Sequence[DumpLine], b: Sequence[DumpLine]) -> list[str]:
    matcher = SequenceMatcher(
        None, [line.text() for line in a], [line.text() for line in b], autojunk=False
    )
    removed: list[DumpLine] = []
    added: list[DumpLine] = []
    partner: dict[int, int] = {}
    for kind, i, j, m, n in matcher.get_opcodes():
        if kind == "equal":
            partner |= dict(zip(range(i, j), range(m, n), strict=True))
        else:
            removed += a[i:j]
            added += b[m:n]
    changes = [*_grouped("-", removed), *_grouped("+", added)]
    for i, j in partner.items():
        changes += [
            f"{a[i].text()}: reads {_read_by(b, there)} instead of {_read_by(a, here)}"
            for here, there in zip(a[i].reads, b[j].reads, strict=True)
            if _reads_differ(here, there, partner)
        ]
    more = len(changes) - MAX_LINES
    return [*changes[:MAX_LINES], f"and {more} more lines"] if more > 0 else changes


def _reads_differ(here: int | str, there: int | str, partner: Mapping[int, int]) -> bool:
    """Whether two equal lines read different lines. A line without partner is reported itself, and
    does not count.
    """
    if isinstance(here, str) or isinstance(there, str):
        return here != there
    return here in partner and there in partner.values() and partner[here] != there


def _read_by(lines: Sequence[DumpLine], read: int | str) -> str:
    return f"input {read}" if isinstance(read, str) else lines[read].text()


def _grouped(sign: str, lines: Sequence[DumpLine]) -> list[str]:
    """The lines; those that differ only in their layer once, with the layers."""
    groups = grouped_by(lambda line: f"{line.says}  {collapsed(line.path)}".rstrip(), lines)
    shown = []
    for text, same in groups.items():
        layers = spans(layer for line in same if (layer := layer_of(line.path)) is not None)
        many = f" (x{len(same)}" + (f", layers {layers})" if layers else ")")
        shown.append(f"{sign} {same[0].text() if len(same) == 1 else text + many}")
    return shown
