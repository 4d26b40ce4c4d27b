"""Fields of configs with a few values: those of a Literal, or of their metadata `choices`."""

from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin

from atomc.errors import suggestion


def choices(field: "Field[Any]") -> Sequence[str]:
    """The values of the field beside None; () if it can have others."""
    if values := field.metadata.get("choices"):
        return tuple(values)
    for hint in (field.type, *get_args(field.type)):
        if get_origin(hint) is Literal:
            return get_args(hint)
    return ()


def check_choices(config: Any) -> None:
    """Raise ValueError for a field of this dataclass with another value than its choices."""
    for field in fields(config):
        value, allowed = getattr(config, field.name), choices(field)
        if allowed and value is not None and value not in allowed:
            raise ValueError(
                f"{field.name} is {value!r}{suggestion(str(value), allowed)}, expected one of "
                f"{', '.join(allowed)}"
            )
