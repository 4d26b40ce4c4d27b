"""Command line flags and TOML keys, generated from the fields of config classes."""

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from atomc.files.file_of_flag import file_of_flag
from atomc.runtime.config_fields import choices

Values = dict[str, Any]
POSITIONAL = ("model",)


def add_flags(
    parser: argparse.ArgumentParser, config: type, *, only: Sequence[str] | None = None
) -> None:
    """Adds a flag per field, in the group of its metadata; of some fields only, if `only` has
    their names.

    A flag that is not given is absent from the namespace, so that a config file can set it. The
    fields in POSITIONAL are arguments without a flag.
    """
    # argparse has no public way to look up a group, and configs share groups.
    added = {group.title: group for group in parser._action_groups}
    for option in fields(config):
        if only is not None and option.name not in only:
            continue
        if option.name in POSITIONAL:
            parser.add_argument(
                option.name,
                nargs="?",
                metavar=option.name.upper(),
                default=argparse.SUPPRESS,
                help=_help(option),
            )
            continue
        title = option.metadata["group"]
        group = added.get(title) or added.setdefault(title, parser.add_argument_group(title))
        group.add_argument(f"--{option.name.replace('_', '-')}", **_flag(option))


def values_of(arguments: argparse.Namespace, from_file: Mapping[str, Any], config: type) -> Values:
    """The values of a config's fields, from flags, else from the file. Raises ValueError for a
    wrong type in the file.
    """
    values: Values = {}
    for option in fields(config):
        if option.name in from_file:
            values[option.name] = _checked(option, from_file[option.name])
        if hasattr(arguments, option.name):
            kind, value = _kind(option), getattr(arguments, option.name)
            values[option.name] = kind(value) if kind in (dict, tuple) else value
    return values


def read_toml(file: Path, *configs: type) -> Values:
    """The keys of the file, with _ for -. Raises ValueError for invalid TOML and unknown keys."""
    try:
        with file_of_flag("--config", file):
            text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"--config {file} is not valid TOML: {error}") from error
    names = [option.name for config in configs for option in fields(config)]
    values = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = [key for key in table if key.replace("-", "_") not in names]
    if unknown:
        raise ValueError(
            f"--config {file} has unknown keys {', '.join(map(repr, unknown))}, expected "
            f"{', '.join(sorted(names))}"
        )
    return values


def _kind(option: "Field[Any]") -> type:
    """The type of a field's value: bool, int, float, str, tuple (of str) or dict (str -> value)."""
    if choices(option):
        return str
    hint = _hint(option)
    origin = get_origin(hint) or hint
    return origin if origin in (bool, int, float, str, tuple) else dict


def _hint(option: "Field[Any]") -> Any:
    """The type of the field, without None."""
    if get_origin(option.type) not in (Union, UnionType):
        return option.type
    return next(part for part in get_args(option.type) if part is not type(None))


def _flag(option: "Field[Any]") -> dict[str, Any]:
    kind = _kind(option)
    shared: dict[str, Any] = {
        "dest": option.name,
        "default": argparse.SUPPRESS,
        "help": _help(option),
    }
    if kind is bool:
        return shared | {"action": argparse.BooleanOptionalAction}
    if kind is tuple:
        return shared | {"action": "append", "metavar": "X"}
    if kind is dict:
        return shared | {"action": "append", "metavar": "NAME=VALUE", "type": named_value}
    if values := choices(option):
        return shared | {"choices": values, "metavar": "NAME"}
    return shared | {"type": kind, "metavar": {"int": "N", "float": "X"}.get(kind.__name__, "TEXT")}


def _help(option: "Field[Any]") -> str:
    meaning, default = str(option.metadata["help"]), option.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    if default not in (MISSING, None, ()):
        meaning += f" (default: {default})"
    return meaning.replace("%", "%%")


def named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _checked(option: "Field[Any]", value: Any) -> Any:
    """The value of a key in a config file. Raises ValueError for another type than the field's."""
    kind = _kind(option)
    if kind is tuple:
        value = (value,) if isinstance(value, str) else value
        valid = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
        value = tuple(value) if valid else value
    elif kind is float:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        valid = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not valid:
        expected = {"tuple": "a list of strings", "dict": "a table"}.get(
            kind.__name__, kind.__name__
        )
        raise ValueError(f"{option.name} is {value!r} in the config file, expected {expected}")
    return value
