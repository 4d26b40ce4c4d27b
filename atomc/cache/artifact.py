"""Compiled functions as plain data: the Python that torch.fx and Inductor made, and the names of what that calls.

Plain data are dicts, lists, tuples, numbers, strings, dtypes and tensors. Functions are referred to by name: a kernel by
op, provider and function, anything else by module and name.
"""

import importlib
import math
import operator
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.profiler import record_function

from atomc.op import REGISTRY
from atomc.profiler_ranges import with_ranges

Plain = dict[str, Any]


class Unstorable(Exception):
    """The function cannot be made plain data; the message says why."""


def executed(code: Any, names: Mapping[str, Any], owner: Mapping[str, Any]) -> Callable[..., Any]:
    """The method `forward` that the code defines, of an object with these attributes."""
    namespace = {**names, "record_function": record_function}
    exec(compile(code, "<atomc>", "exec"), namespace)
    return types.MethodType(namespace["forward"], types.SimpleNamespace(**owner))


def made_of(plain: Plain, named: bool = False) -> Callable[..., Any]:
    """The function again; with a profiler's ranges if `named`. Raises whatever a name that no longer exists raises."""
    if plain["kind"] == "inductor":
        from atomc.torch_compat.inductor import InductorCode, from_code  # of the many parts of torch that this takes

        return from_code(InductorCode(**plain["code"]), plain["returns_tuple"], plain["patches"])
    unique = [made_of(piece, named) for piece in plain["unique"]]
    names = {name: resolved(reference) for name, reference in plain["names"].items()}
    code = with_ranges(plain["source"], plain["labels"]) if named else plain["source"]
    return executed(code, names, {**plain["constants"], **{name: unique[i] for name, i in plain["pieces"].items()}})


Reference = tuple[str, ...]


def reference(item: Any) -> Reference:
    """The name of a module, a function, a kernel or what belongs to one. Raises Unstorable if it has none."""
    if isinstance(item, types.ModuleType):
        return ("module", item.__name__)
    if isinstance(item, float) and not math.isfinite(item):
        return ("float", repr(item))
    if item is type(None):
        return ("none",)
    for op in REGISTRY.values():
        if op.reference is item:
            return ("meaning", op.name)
        for kernel in op.kernels:
            for field, function in _parts_of(kernel):
                if function is item:
                    return ("kernel", op.name, kernel.provider, _full_name(kernel.function), field)
    found: Reference = ("name", getattr(item, "__module__", None) or "builtins", getattr(item, "__qualname__", ""))
    try:
        same = resolved(found) is item
    except (ImportError, AttributeError):
        same = False
    if not same:
        raise Unstorable(f"{item!r} cannot be found by its name in another process")
    return found


def resolved(name: Reference) -> Any:
    """What a reference names. Raises ImportError, AttributeError or LookupError if that is gone."""
    kind, *rest = name
    if kind == "module":
        return importlib.import_module(rest[0])
    if kind == "float":
        return float(rest[0])
    if kind == "none":
        return type(None)
    if kind == "meaning":
        return REGISTRY[rest[0]].reference
    if kind == "name":
        return operator.attrgetter(rest[1])(importlib.import_module(rest[0]))
    op, provider, function, field = rest
    for kernel in REGISTRY[op].kernels:
        if kernel.provider == provider and _full_name(kernel.function) == function:
            return dict(_parts_of(kernel))[field]
    raise LookupError(f"no kernel {function} of {provider} for {op}")


def _parts_of(kernel: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a kernel that a lowered graph may refer to, by name."""
    yield "function", kernel.function
    if kernel.workspace is not None:
        yield "workspace", kernel.workspace
    if kernel.plan is not None:
        yield "plan", kernel.plan
    for names, prepare in kernel.prepare.items():
        yield f"prepare {', '.join(names)}", prepare


def _full_name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
