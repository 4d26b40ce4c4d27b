"""Deletions of the parts of refusals, made from the syntax tree of a file of kernels.

A part is what alone can make a kernel refuse a call: a condition, each operand of `or`, each operand
of `and` where a call is taken if all hold, a check in `first_refusal`, a tensor that a check looks
at. Without a part a kernel takes more calls, so only a test in which the part refuses can notice:
`watched` is a text that says when it does.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from mutations import ROOT
from mutations.generate import Function, Generator, Mutant, functions

FOLDER = "atomc/kernels/aiter"
# The tests of these kernels.
TESTS = "tests/kernels/aiter/test_*.py"
# Checks of any number of arguments -> how many come before these.
LEADING = {
    "apart": 0,
    "coded": 0,
    "foreign_fp8": 1,
    "gapped": 0,
    "installed": 0,
    "scaled": 0,
    "scattered": 0,
    "scattered_blocks": 0,
    "strided": 0,
    "unfit": 1,
    "unlike": 1,
    "unlike_shapes": 1,
    "unsupported": 1,
    "wrong_rank": 1,
    "_off_vectors": 0,
    "_share_rows": 0,
}
# Functions that guards ask, and what they return to say no.
PREDICATES: dict[str, bool | None] = {"table_dimension": None}
# What a watched text calls with a number and a value, which they return: that refuses if it is
# true, unless it is true, if its result is true.
IF, UNLESS, CHECK = "_refuses_if", "_refuses_unless", "_refuses_by"

# The share of deletions that must turn a test red.
FLOOR = 0.97
# Deletions that no test can notice, and why.
SURVIVORS = {
    "atomc/kernels/aiter/collective/groups.py: _are_missing: return any(isinstance(function.found, "
    "str) for function in FUNCTIONS) -> return True": "ranks ask, in processes of their own",
}

Span = tuple[int, int]
Watch = tuple[Span, str]


@dataclass(frozen=True)
class Deletion:
    """A mutant, and where its part refuses: a value from `start` to `end`, under IF, UNLESS or
    CHECK.
    """

    mutant: Mutant
    watches: frozenset[Watch]


@dataclass(frozen=True)
class _Change:
    span: Span
    new: str
    watches: frozenset[Watch] = field(compare=False)


def all_deletions() -> dict[str, list[Deletion]]:
    """The deletions of each file that has some."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).rglob("*.py"))
    by_file = {file: deletions(file, Path(ROOT, file).read_text()) for file in files}
    return {file: parts for file, parts in by_file.items() if parts}


def deletions(file: str, text: str) -> list[Deletion]:
    """The deletions of a file, by their places."""
    parts, tree = _Parts(file, text), ast.parse(text)
    by_change: dict[_Change, Deletion] = {}
    for name, function in functions(tree):
        for change in parts.in_function(name, function):
            by_change.setdefault(change, parts.deletion(name, change))
    for node in ast.walk(tree):
        for change in parts.in_chain(node):
            by_change.setdefault(change, parts.deletion("first_refusal", change))
    return [by_change[change] for change in sorted(by_change, key=lambda c: (c.span, c.new))]


def watched(text: str, numbers: dict[Watch, int]) -> str:
    """The text, in which each of these values is passed to what watches it, with its number."""
    starts = [((a, -b), f"{kind}({n}, ") for ((a, b), kind), n in numbers.items()]
    ends = [((b, -a), ")") for ((a, b), kind), n in numbers.items()]
    pieces, at = [], 0
    # At one place, what ends there comes before what starts there; of several, the inner one ends
    # first and starts last.
    marks = [(place, 1, size, new) for (place, size), new in starts]
    marks += [(place, 0, size, new) for (place, size), new in ends]
    for place, _, _, new in sorted(marks):
        pieces += [text[at:place], new]
        at = place
    return "".join([*pieces, text[at:]])


class _Parts(Generator):
    """The parts of refusals, as changes of the text."""

    def deletion(self, name: str, change: _Change) -> Deletion:
        start, end = change.span
        label = self.label(start, end, change.new)
        return Deletion(Mutant(self.file, name, start, end, change.new, label), change.watches)

    def in_function(self, name: str, function: Function) -> Iterator[_Change]:
        returns = "" if function.returns is None else ast.unparse(function.returns)
        if "Refusal" in returns:
            yield from self._in_statements(function.body, None, refuses=True)
        elif returns == "bool" or name in PREDICATES:
            yield from self._in_statements(function.body, PREDICATES.get(name, False))

    def in_chain(self, node: ast.AST) -> Iterator[_Change]:
        """Of `first_refusal(...)`, each check; of `named(...)`, each name; of others, arguments."""
        match node:
            case ast.Call(func=ast.Name(id="first_refusal"), args=args):
                for check in args:
                    span = self.span(check)
                    yield _Change(span, "lambda: None", frozenset({(span, CHECK)}))
                    if isinstance(check, ast.Lambda):
                        for change in self._weaker(check.body):
                            if change.span != self.span(check.body):
                                yield change
            case ast.Call(
                func=ast.Name(id="named"), args=[ast.Constant(value=str(names)) as first, *_]
            ):
                for name in names.split() if " " in names else ():
                    rest = " ".join(word for word in names.split() if word != name)
                    watches = frozenset({(self.span(node), CHECK)})
                    yield _Change(self.span(first), f'"{rest}"', watches)
            case ast.Call(func=ast.Name(id="installed")):
                yield from self._without_arguments(node, CHECK)

    def _in_statements(
        self, statements: list[ast.stmt], no: bool | None, refuses: bool = False
    ) -> Iterator[_Change]:
        """refuses: they return a Refusal; otherwise they return `no` to refuse."""
        for statement in statements:
            match statement:
                case ast.If(test=test, body=body, orelse=orelse):
                    leaf = body[-1]
                    answer = self._answer(leaf, no, refuses)
                    if answer is True:
                        yield from self._weaker(test)
                        body = body[:-1]
                    elif answer is False and _is_compound(test):
                        yield from self._weaker(test, refuses=False)
                    yield from self._in_statements(body, no, refuses)
                    yield from self._in_statements(orelse, no, refuses)
                case ast.For(iter=ast.Tuple() as elements, body=body):
                    changes = list(self._in_statements(body, no, refuses))
                    watches = frozenset(watch for change in changes for watch in change.watches)
                    yield from self._without_elements(elements, watches)
                    yield from changes
                case ast.For(body=body) | ast.With(body=body):
                    yield from self._in_statements(body, no, refuses)
                case ast.Try(body=body, handlers=handlers):
                    yield from self._in_statements(body, no, refuses)
                    for handler in handlers:
                        yield from self._in_statements(handler.body, no, refuses)
                case ast.Assign(value=ast.BoolOp(op=ast.Or()) as value) if refuses:
                    yield from self._weaker(value)
                case ast.Return(value=ast.Call(func=ast.Name(id="Refusal")) as value):
                    watches = frozenset({(self.span(value), IF)})
                    yield _Change(self.span(statement), "pass", watches)
                case ast.Return(value=ast.BoolOp() | ast.Call() | ast.IfExp() as value) if refuses:
                    yield from self._weaker(value)
                case ast.Return(value=ast.BoolOp() | ast.Call() | ast.Compare() as value) if (
                    no is False
                ):
                    yield from self._weaker(value, refuses=False)

    def _answer(self, leaf: ast.stmt, no: bool | None, refuses: bool) -> bool | None:
        """Whether a branch that ends so refuses; None if it does something else."""
        match leaf:
            case ast.Return(value=ast.Call(func=ast.Name(id="Refusal")) | ast.Name(id="reason")):
                return True
            case ast.Return(value=ast.Constant(value=None)) if refuses:
                return False
            case ast.Return(value=ast.Constant(value=answer)) if not refuses:
                return answer is no
        return None

    def _weaker(self, node: ast.expr, refuses: bool = True) -> Iterator[_Change]:
        """The expression without each of its parts. refuses: if it is true, otherwise if not."""
        kind = IF if refuses else UNLESS
        condition = _Change(
            self.span(node), str(None if refuses else True), self._watches(node, kind)
        )
        match node:
            case ast.NamedExpr(value=value):
                yield from self._weaker(value, refuses)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from self._weaker(operand, not refuses)
            case ast.BoolOp(op=op, values=values) if isinstance(op, ast.Or) == refuses:
                for value in values:
                    yield from self._weaker(value, refuses)
            case ast.BoolOp(values=values):
                yield condition
                for value in filter(_is_compound, values):
                    yield from self._weaker(value, refuses)
            case ast.IfExp(test=test, orelse=ast.Constant(value=None)):
                yield from self._weaker(test, refuses)
            case ast.IfExp(test=test, body=ast.Constant(value=None)):
                yield from self._weaker(test, not refuses)
            case ast.Call(
                func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp(elt=elt) as each]
            ):
                yield condition
                if _is_compound(elt):
                    yield from self._weaker(elt, refuses)
                for loop in each.generators:
                    if isinstance(loop.iter, ast.Tuple):
                        yield from self._without_elements(loop.iter, condition.watches)
            case ast.Compare(left=left, ops=[_, _, *_], comparators=others) if not refuses:
                yield from self._without_links(node, [left, *others])
            case ast.Compare(
                left=ast.Tuple() as left, ops=[ast.Eq()], comparators=[ast.Tuple() as right]
            ) if not refuses:
                for rest in _without_each(list(zip(left.elts, right.elts, strict=True))):
                    new = " and ".join(f"{self.text_of(a)} == {self.text_of(b)}" for a, b in rest)
                    yield _Change(self.span(node), f"({new})", self._watches(node, UNLESS))
            case _:
                yield condition
                yield from self._without_arguments(node, kind)

    def _without_arguments(self, node: ast.expr, kind: str) -> Iterator[_Change]:
        """A check of several tensors, without each of them."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in LEADING:
                parts: list[ast.expr | ast.keyword] = [*args[LEADING[name] :], *keywords]
                if len(parts) < 2 or any(isinstance(part, ast.Starred) for part in parts):
                    return
                for i, part in enumerate(parts):
                    span = (self.span(parts[i - 1])[1], self.span(part)[1])
                    if i == 0:
                        span = (self.span(part)[0], self.span(parts[1])[0])
                    yield _Change(span, "", self._watches(node, kind))

    def _without_elements(self, node: ast.Tuple, watches: frozenset[Watch]) -> Iterator[_Change]:
        for rest in _without_each(node.elts):
            new = "".join(f"{self.text_of(element)}, " for element in rest)
            yield _Change(self.span(node), f"({new})", watches)

    def _without_links(self, node: ast.Compare, terms: list[ast.expr]) -> Iterator[_Change]:
        """a < b <= c as `b <= c` and as `a < b`."""
        links = [self.text[self.span(a)[0] : self.span(b)[1]] for a, b in pairwise(terms)]
        for rest in _without_each(links):
            new = " and ".join(rest)
            yield _Change(self.span(node), f"({new})", self._watches(node, UNLESS))

    def _watches(self, node: ast.expr, kind: str) -> frozenset[Watch]:
        return frozenset({(self.span(node), kind)})


def _without_each(
    elements: list[ast.expr] | list[str] | list[tuple[ast.expr, ast.expr]],
) -> Iterator[list]:
    """The elements without the first one, without the second one, ..."""
    for i in range(len(elements)):
        yield [*elements[:i], *elements[i + 1 :]]


def _is_compound(node: ast.expr) -> bool:
    """Whether several parts of it can refuse or accept."""
    match node:
        case ast.NamedExpr(value=value) | ast.UnaryOp(op=ast.Not(), operand=value):
            return _is_compound(value)
        case ast.Compare(ops=ops, left=left):
            return len(ops) > 1 or isinstance(left, ast.Tuple)
        case ast.Call(func=ast.Name(id="any" | "all")) | ast.BoolOp():
            return True
    return False
