"""Fields of configs: their flags, and the values that they may have."""

from collections.abc import Iterable, Sequence
from dataclasses import Field, field, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from atomc.errors import suggestion

T = TypeVar("T")


class FlagGroup(NamedTuple):
    """Makes fields of configs whose flags are one group of --help."""

    title: str

    def option(
        self, default: T, text: str, choices: Iterable[str] = (), *, least: float | None = None
    ) -> T:
        """A field with this default, help text, values if it has a few, and least value."""
        metadata = {"help": text, "group": self.title, "choices": tuple(choices), "least": least}
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


def check_values(config: Any) -> None:
    """Raise ValueError for a field of this dataclass with another value than its choices, and for
    one below its least value.
    """
    for option in fields(config):
        value, allowed = getattr(config, option.name), choices(option)
        least = option.metadata.get("least")
        if value is None:
            continue
        if allowed and value not in allowed:
            raise ValueError(
                f"{option.name} is {value!r}{suggestion(str(value), allowed)}, expected one of "
                f"{', '.join(allowed)}"
            )
        if least is not None and not value >= least:  # also rejects nan
            raise ValueError(f"{option.name} is {value}, it must be at least {least}")
