"""What a site decides of a pattern besides its tensors: numbers, strings, dtypes and flags.

A float or a string is found among the attributes of the traced ops by its value. For an int or a
`OneOf` the pattern is traced with two values: where the two traces differ the site decides, and no
other number can be taken for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from atomc.graph.canonical import Capture, call


class OneOf:
    """In an example: the site decides, and it is one of these. The same object in several places is
    one decision.

    The first two values are those that the pattern is traced with; a single one is a constant. As
    the dtype of a tensor:
    see rewrite.tensor_example.

    follows  of values that are tensors, the decision about their dtypes
    """

    def __init__(self, *values: Any, follows: "OneOf | None" = None):
        self.values, self.follows = values, follows

    def __contains__(self, item: object) -> bool:
        return item in self.values


def stand_ins(example: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """The arguments to trace a pattern with. What is captured by difference has another value at
    turn 1 than at turn 0.
    """
    return {
        name: _stand_in(given, i, turn, example) for i, (name, given) in enumerate(example.items())
    }


def _stand_in(given: Any, i: int, turn: int, example: Mapping[str, Any]) -> Any:
    if isinstance(given, OneOf):
        # A dtype that no argument says is no attribute: the trace with the first one shows all.
        stays = given.follows is not None and not any(
            given.follows is other for other in example.values()
        )
        return given.values[0 if stays else min(turn, len(given.values) - 1)]
    if type(given) is int:
        return given + turn * (1 + i)
    return (
        given + 0.7310585 + i if isinstance(given, float) else given
    )  # a number that nobody writes


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[tuple[Any, Any], str]:
    """(value at turn 0, value at turn 1) -> the argument that has these.

    Raises ValueError if two arguments cannot be told apart.
    """
    found: dict[tuple[Any, Any], str] = {}
    for name, value in first.items():
        if not isinstance(value, Tensor) and value is not second[name] and value != second[name]:
            other = found.setdefault((value, second[name]), name)
            if other != name:
                raise ValueError(f"pattern: `{other}` and `{name}` are traced with the same values")
    return found


def capture(nodes: Sequence[Node], others: Sequence[Node], example: Mapping[str, Any]) -> set[str]:
    """Put a Capture in the place of every attribute that the site decides. Returns the arguments
    that were found.

    nodes, others  of the traces at turn 0 and 1; the same ones if nothing is captured by difference

    Raises ValueError if the traces differ in more than attributes that are arguments, or an
    argument is no attribute.
    """
    first = stand_ins(example, 0)
    by_difference = differing(first, stand_ins(example, 1))
    by_value = {
        (type(first[name]), first[name]): name
        for name, given in example.items()
        if isinstance(given, float | str)
    }
    if _structure(nodes) != _structure(others):
        raise ValueError(
            f"pattern: {', '.join(by_difference.values())} change more than attributes: make "
            "it several cases"
        )
    decided = _Decided(example, by_value, by_difference)
    for node, other in zip(nodes, others, strict=True):
        attrs, there = call(node).attrs, call(other).attrs
        for name, attr in attrs.items():
            attrs[name] = decided.captured(attr, there.get(name))
    needed = {name for name, given in first.items() if isinstance(given, float)} | set(
        by_difference.values()
    )
    if needed - decided.found:
        raise ValueError(
            f"pattern: no op has {', '.join(sorted(needed - decided.found))} as an attribute"
        )
    return decided.found


@dataclass
class _Decided:
    """Which attribute is which argument.

    by_value       (type, value) of an attribute that is the same in both traces -> argument
    by_difference  (attribute at turn 0, at turn 1) -> argument
    found          the arguments that were met
    """

    example: Mapping[str, Any]
    by_value: Mapping[tuple[Any, Any], str]
    by_difference: Mapping[tuple[Any, Any], str]
    found: set[str] = field(default_factory=set)

    def captured(self, here: Any, there: Any) -> Any:
        """What stands in the place of an attribute that is `here` at turn 0 and `there` at turn
        1.
        """
        if isinstance(here, tuple) and isinstance(there, tuple):
            return tuple(self.captured(*both) for both in zip(here, there, strict=True))
        if isinstance(here, torch.SymInt) or isinstance(there, torch.SymInt):
            return here
        name = (
            self.by_value.get((type(here), here))
            if here == there
            else self.by_difference.get((here, there))
        )
        if name is not None:
            self.found.add(name)
            given = self.example[name]
            return Capture(name, given.values if isinstance(given, OneOf) else ())
        if here != there:
            raise ValueError(f"pattern: {here} of an op becomes {there}, which is no argument")
        return here


def _structure(nodes: Sequence[Node]) -> list[tuple[str, list[str]]]:
    return [(call(node).op, [operand.name for operand in call(node).operands]) for node in nodes]
