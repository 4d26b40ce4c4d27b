"""Captured attributes of a pattern: numbers, strings, dtypes and flags that each site provides.

A float or a string is located among the attributes of the traced ops by its value. For an int or a
`OneOf`, the pattern is traced with two values: an attribute in which the traces differ is captured,
so no other number can be confused with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import Attr, Capture, call
from atomc.rewriting.example import ExampleValue, Fixed, OneOf


def stand_ins(example: Mapping[str, ExampleValue], turn: int) -> dict[str, Fixed]:
    """The arguments to trace a pattern with. Ints and `OneOf` have another value at turn 1 than at
    turn 0.
    """
    return {
        name: _stand_in(value, i, turn, example) for i, (name, value) in enumerate(example.items())
    }


def _stand_in(value: ExampleValue, i: int, turn: int, example: Mapping[str, ExampleValue]) -> Fixed:
    if isinstance(value, OneOf):
        # The dtype of a tensor is an attribute only if it is also an argument.
        fixed = value.follows is not None and not any(
            value.follows is other for other in example.values()
        )
        return value.values[0 if fixed else min(turn, len(value.values) - 1)]
    if type(value) is int:
        return value + turn * (1 + i)
    if isinstance(value, float):
        return value + 0.7310585 + i  # a number that no model contains
    return value


def differing(
    first: Mapping[str, Fixed], second: Mapping[str, Fixed]
) -> dict[tuple[Attr, Attr], str]:
    """(value at turn 0, value at turn 1) -> the argument with these values.

    Raises ValueError if two arguments have the same values.
    """
    names: dict[tuple[Attr, Attr], str] = {}
    for name, value in first.items():
        if not isinstance(value, Tensor) and value is not second[name] and value != second[name]:
            other = names.setdefault((value, second[name]), name)
            if other != name:
                raise ValueError(f"pattern: `{other}` and `{name}` are traced with the same values")
    return names


def capture(
    nodes: Sequence[Node], others: Sequence[Node], example: Mapping[str, ExampleValue]
) -> set[str]:
    """Replace every captured attribute by a Capture. Returns the arguments that were located.

    nodes, others  of the traces at turn 0 and 1; the same if no argument differs between them

    Raises ValueError if the traces differ in more than attributes that are arguments, or if an
    argument is not an attribute.
    """
    first = stand_ins(example, 0)
    by_difference = differing(first, stand_ins(example, 1))
    by_value: dict[tuple[type, Attr], str] = {
        (type(first[name]), first[name]): name
        for name, value in example.items()
        if isinstance(value, float | str)
    }
    if _structure(nodes) != _structure(others):
        raise ValueError(
            f"pattern: {', '.join(by_difference.values())} change more than attributes: use "
            "several cases"
        )
    captures = _Captures(example, by_value, by_difference)
    for node, other in zip(nodes, others, strict=True):
        attrs, there = call(node).attrs, call(other).attrs
        for name, attr in attrs.items():
            attrs[name] = captures.replace(attr, there.get(name))
    needed = {name for name, value in first.items() if isinstance(value, float)} | set(
        by_difference.values()
    )
    if needed - captures.found:
        raise ValueError(
            f"pattern: no op has {', '.join(sorted(needed - captures.found))} as an attribute"
        )
    return captures.found


@dataclass
class _Captures:
    """Which attribute is which argument.

    by_value       (type, value) of an attribute that is the same in both traces -> argument
    by_difference  (attribute at turn 0, at turn 1) -> argument
    found          the arguments located so far
    """

    example: Mapping[str, ExampleValue]
    by_value: Mapping[tuple[type, Attr], str]
    by_difference: Mapping[tuple[Attr, Attr], str]
    found: set[str] = field(default_factory=set)

    def replace(self, here: Attr, there: Attr) -> Attr:
        """The Capture for an attribute that is `here` at turn 0 and `there` at turn 1, or the
        attribute itself.
        """
        if isinstance(here, tuple) and isinstance(there, tuple):
            return tuple(self.replace(*both) for both in zip(here, there, strict=True))
        if isinstance(here, torch.SymInt) or isinstance(there, torch.SymInt):
            return here
        name = (
            self.by_value.get((type(here), here))
            if here == there
            else self.by_difference.get((here, there))
        )
        if name is not None:
            self.found.add(name)
            value = self.example[name]
            return Capture(name, value.values if isinstance(value, OneOf) else ())
        if here != there:
            raise ValueError(f"pattern: {here} of an op becomes {there}, which is not an argument")
        return here


def _structure(nodes: Sequence[Node]) -> list[tuple[str, list[str]]]:
    return [(call(node).op, [operand.name for operand in call(node).operands]) for node in nodes]
