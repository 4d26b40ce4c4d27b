"""Profiler ranges with the names of modules and ops around the calls of a compiled graph."""

import ast
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from atomc.torch_compat.core import profiler_is_on

P = ParamSpec("P")
T = TypeVar("T")


def add_ranges(source: str, labels: Mapping[str, str]) -> ast.Module:
    """Generated code with a profiler range around each assignment to a name that has a label."""
    tree = ast.parse(source)
    for function in (item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef)):
        function.body = [_ranged(line, labels) for line in function.body]
    return ast.fix_missing_locations(tree)


def _ranged(line: ast.stmt, labels: Mapping[str, str]) -> ast.stmt:
    target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
    label = labels.get(target.id) if isinstance(target, ast.Name) else None
    if label is None or (
        isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
    ):  # `x = None` frees x
        return line
    entered = ast.parse(f"with record_function({label!r}): pass").body[0]
    assert isinstance(entered, ast.With)
    entered.body = [line]
    return entered


def profiled(call: Callable[P, T], named: Callable[[], Callable[P, T]]) -> Callable[P, T]:
    """`call`; while a profiler is active, the result of `named()`, the same function with a range
    around each kernel.
    """
    functions: list[Callable[P, T]] = []

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not profiler_is_on():
            return call(*args, **kwargs)
        if not functions:
            functions.append(named())
        return functions[0](*args, **kwargs)

    return run
