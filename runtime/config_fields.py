"""Fields of configs: their flags, and the values of those that have a few."""

from collections.abc import Iterable, Sequence
from dataclasses import Field, field, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from atomc.errors import suggestion

T = TypeVar("T")


class FlagGroup(NamedTuple):
    """Makes fields of configs whose flags are one group of --help."""

    title: str

    def option(self, default: T, text: str, choices: Iterable[str] = ()) -> T:
        """A field with this default, help text, and values if it has a few."""
        metadata = {"help": text, "group": self.title, "choices": tuple(choices)}
        return field(default=default, metadata=metadata)

    def table(self, text: str) -> Any:
        """A field that is a mapping, and empty by default."""
        return field(default_factory=dict, metadata={"help": text, "group": self.title})


def choices(option: "Field[Any]") -> Sequence[str]:
    """The values of the field beside None, of its Literal or its metadata; () if it can have
    others.
    """
    if values := option.metadata.get("choices"):
        return tuple(values)
    for hint in (option.type, *get_args(option.type)):
        if get_origin(hint) is Literal:
            return get_args(hint)
    return ()


def check_choices(config: Any) -> None:
    """Raise ValueError for a field of this dataclass with another value than its choices."""
    for option in fields(config):
        value, allowed = getattr(config, option.name), choices(option)
        if allowed and value is not None and value not in allowed:
            raise ValueError(
                f"{option.name} is {value!r}{suggestion(str(value), allowed)}, expected one of "
                f"{', '.join(allowed)}"
            )
