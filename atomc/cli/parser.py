"""An argument parser that reports errors in one line, with a suggestion."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from atomc.errors import suggestion
from atomc.files.json_file import read_json

FOREIGN_FLAGS = Path(__file__).with_name("foreign_flags.json")


class PrintCompletion(argparse.Action):
    """Prints a shell's completion script, which shtab makes from the parser, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: Any, *_: object
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs shtab: pip install 'atomc[completion]'")
        print(shtab.complete(parser, values))
        parser.exit()


def foreign_flags(command: str) -> dict[str, str]:
    """Flags of other servers, none of which this command has, with the equivalent in atomc: shown
    as a hint when one is given. docs/from-vllm.md has the same table.
    """
    hints: dict[str, str] = read_json(FOREIGN_FLAGS).get(command, {})
    return hints


class CommandParser(argparse.ArgumentParser):
    """Reports an unknown flag by the subcommand that got it, with a hint or a similar flag."""

    # Any, because argparse's types differ between versions.
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {value!r}{suggestion(str(value), names)}; choose from "
                f"{', '.join(names)}",
            )

    def error(self, message: str) -> NoReturn:
        print(f"atomc: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    # Any, because argparse's types differ between versions.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None:
            self._check_first(sys.argv[1:] if args is None else args)
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            self.error(self._unrecognized(unknown))
        return parsed, unknown

    def _check_first(self, args: Sequence[str]) -> None:
        """Reports an unknown flag before the command, which argparse reports as a missing one."""
        if not args or not args[0].startswith("-"):
            return
        name = args[0].partition("=")[0]
        if not any(flag.startswith(name) for flag in self._option_string_actions):
            self.error(self._unrecognized(args[:1]))

    def _unrecognized(self, unknown: Sequence[str]) -> str:
        first = next((argument for argument in unknown if argument.startswith("-")), None)
        if first is None:
            return f"unrecognized arguments: {' '.join(unknown)}"
        flag = first.partition("=")[0].replace("_", "-")
        hint = foreign_flags(self.prog).get(flag)
        names = {option.lstrip("-"): option for option in self._option_string_actions}
        near = get_close_matches(flag.lstrip("-"), names, n=1)  # with dashes, all look similar
        suggestion = hint or (f"did you mean {names[near[0]]}?" if near else "")
        return f"unrecognized arguments: {first}" + (f" ({suggestion})" if suggestion else "")
