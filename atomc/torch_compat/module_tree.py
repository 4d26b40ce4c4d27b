"""The modules that a function under compilation got, and their names in the module tree."""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator

NamedRoot = tuple[str, nn.Module]  # a name, and the root of the tree that has it


def module_names() -> dict[int, NamedRoot]:
    """(name, root) of each module in the arguments of the function that Dynamo is compiling, by
    id: its name in the tree of the largest module that contains it. {} outside of a compile.

    A name below a list, or one of several in a tuple, begins with the index; *args and **kwargs
    are no place in a tree.
    """
    try:
        root_tx = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # outside of a compile
        return {}
    code = root_tx.f_code
    packed = code.co_flags & inspect.CO_VARARGS > 0, code.co_flags & inspect.CO_VARKEYWORDS > 0
    first = code.co_argcount + code.co_kwonlyargcount
    packs = set(code.co_varnames[first : first + sum(packed)])
    roots: list[NamedRoot] = []
    value: Any
    for name, value in root_tx.output.local_scope.items():
        if name in packs:
            parts = value.values() if isinstance(value, dict) else value
            roots += (root for part in parts for root in _roots(part))
        else:
            roots += _roots(value)
    names: dict[int, NamedRoot] = {}
    trees = [(root, list(root.named_modules(prefix=prefix))) for prefix, root in roots]
    for root, tree in sorted(trees, key=lambda entry: -len(entry[1])):
        for name, module in tree:
            names.setdefault(id(module), (name, root))
    return names


def _roots(value: Any, prefix: str = "") -> Iterator[NamedRoot]:
    if isinstance(value, nn.Module):
        yield prefix, value
    elif type(value) in (list, tuple, dict):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        if isinstance(value, tuple) and sum(isinstance(x, nn.Module) for _, x in items) == 1:
            items = [("", x) for _, x in items]  # a record, not a sequence of layers
        for key, x in items:
            yield from _roots(x, f"{prefix}.{key}".strip("."))
