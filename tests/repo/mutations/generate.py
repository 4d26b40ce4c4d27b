"""Mutants of a source file, made from its syntax tree: each changes one place inside a function.

Conditions are inverted, guards dropped, operators, branches and arguments exchanged, numbers and
flags changed, keywords and statements removed. What has no effect on results is left alone:
messages of errors, log lines, assertions, annotations, decorators and docstrings.
"""

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

COMPARED = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", ">"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
COMPUTED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
JOINED = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = {"log", "logger", "logging", "warnings"}
WITHOUT_EFFECT = {"strict", "encoding", "stacklevel"}  # of zip, of ASCII files, of warnings
UNCHANGED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Global)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """In `function` of `file`, what stands from `start` to `end` becomes `new`. `label`: the changed
    lines before and after, without their numbers, so that edits elsewhere do not change it.
    """

    file: str
    function: str
    start: int
    end: int
    new: str
    label: str

    def applied_to(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.label}"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """The functions of a file and the methods of its classes, with their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from functions(node, prefix)


def mutants(file: str, text: str, names: frozenset[str] = frozenset()) -> list[Mutant]:
    """All mutants of the named functions, or of all. Some may not be Python any more."""
    generator = Generator(file, text)
    tree = ast.parse(text)
    unknown = names - {name for name, _ in functions(tree)}
    if unknown:
        raise ValueError(f"{file} has no function {', '.join(sorted(unknown))}")
    return [
        mutant
        for name, function in functions(tree)
        if not names or name in names
        for mutant in generator.mutants_in(name, function)
    ]


def sample(mutants: list[Mutant], text: str, number: int, seed: int) -> list[Mutant]:
    """So many of them that compile, each by a number drawn from the seed and its own label, one a
    function by turns: an edit elsewhere in the file leaves most of the sample as it is.
    """
    by_number = sorted(mutants, key=lambda mutant: random.Random(f"{seed} {mutant}").random())
    turns: Counter[str] = Counter()
    by_turn = []
    for mutant in by_number:
        by_turn.append((turns[mutant.function], mutant))
        turns[mutant.function] += 1
    in_turn = (mutant for _, mutant in sorted(by_turn, key=lambda pair: pair[0]))
    return list(islice((m for m in in_turn if _compiles(m.applied_to(text))), number))


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class Generator:
    """Texts of nodes, and what each may be replaced by."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text, self.starts = file, text, [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def mutants_in(self, name: str, function: Function) -> Iterator[Mutant]:
        parts = [*function.args.defaults, *function.args.kw_defaults, *function.body]
        for part in parts:
            for start, end, new in self._changes(part) if part else ():
                yield Mutant(self.file, name, start, end, new, self.label(start, end, new))

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Of a node and all below it: from where to where which text stands instead."""
        if isinstance(node, UNCHANGED) or _has_no_effect(node):
            return
        start, end = self.span(node)
        yield from ((start, end, new) for new in self._replacements(node))
        yield from self._other_operators(node)
        yield from self._without_keywords(node)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._changes(child)

    def _replacements(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Constant(value=bool(value)):
                yield str(not value)
            case ast.Constant(value=int(value)):
                yield str(value + 1)
            case ast.Constant(value=float(value)):
                yield repr(2 * value or 1.0)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield f"({self.text_of(operand)})"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                yield f"({self.text_of(orelse)}) if {self.text_of(test)} else ({self.text_of(body)})"
            case ast.Name(id=name) if name in OPPOSITES:
                yield OPPOSITES[name]
            case ast.Call(args=[first, second, *_]) if not _starred(first, second):
                yield self._exchanged(node, first, second)
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
                yield "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "pass"

    def _other_operators(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """An operator between two operands, and the condition of a branch."""
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield from self._between(left, right, COMPARED.get(type(op)))
            case ast.BinOp(left=left, op=op, right=right):
                yield from self._between(left, right, COMPUTED.get(type(op)))
            case ast.BoolOp(op=op, values=[left, right, *_]):
                yield from self._between(left, right, JOINED[type(op)])
            case ast.AugAssign(target=target, op=op, value=value):
                yield from self._between(target, value, COMPUTED.get(type(op)))
            case ast.If(test=test, body=body, orelse=orelse):
                if not isinstance(test, (ast.Compare, ast.UnaryOp)):
                    yield *self.span(test), f"not ({self.text_of(test)})"
                if not orelse and isinstance(body[-1], LEAVES):
                    yield *self.span(test), "False"

    def _without_keywords(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """A call without one of its keywords, which then has its default."""
        if isinstance(node, ast.Call):
            before = [*node.args, *(word.value for word in node.keywords)]
            for previous, word in zip(before[len(node.args) - 1 :], node.keywords, strict=False):
                if node.args and word.arg and word.arg not in WITHOUT_EFFECT:
                    yield self.span(previous)[1], self.span(word)[1], ""

    def _between(
        self, left: ast.AST, right: ast.AST, operators: tuple[str, str] | None
    ) -> Iterator[tuple[int, int, str]]:
        if operators:
            old, new = operators
            start = self.text.find(old, self.span(left)[1], self.span(right)[0])
            if start >= 0:
                yield start, start + len(old), new

    def _exchanged(self, node: ast.AST, first: ast.AST, second: ast.AST) -> str:
        start, end = self.span(node)
        (a, b), (c, d) = self.span(first), self.span(second)
        text = self.text
        return text[start:a] + text[c:d] + text[b:c] + text[a:b] + text[d:end]

    def label(self, start: int, end: int, new: str) -> str:
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", end)
        lines = self.text[first:last], self.text[first:start] + new + self.text[end:last]
        return " -> ".join(" ".join(line.split()) for line in lines)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where the text of a node begins and ends. (Sources are ASCII: a column is a character.)"""
        if not isinstance(node, (ast.expr, ast.stmt, ast.keyword)):
            return 0, 0
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text_of(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]


def _starred(*nodes: ast.AST) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _has_no_effect(node: ast.AST) -> bool:
    """A docstring, a line for the log, or a keyword that tests cannot see."""
    match node:
        case ast.keyword(arg=name):
            return name in WITHOUT_EFFECT
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in LOGS
    return False
