"""An argument parser that says what is wrong in one line, and what was perhaps meant."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from atomc.cli.elsewhere import ELSEWHERE


class Parser(argparse.ArgumentParser):
    """A flag that does not exist is refused by the command that it was given to, with the nearest one that does."""

    def error(self, message: str) -> NoReturn:
        print(f"atomc: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)

    # With argparse's own types: they differ from version to version.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            self.error(self._about(unknown))
        return found, unknown

    def _about(self, unknown: Sequence[str]) -> str:
        given = next((each for each in unknown if each.startswith("-")), None)
        if given is None:
            return f"unrecognized arguments: {' '.join(unknown)}"
        flag = given.partition("=")[0].replace("_", "-")
        here = ELSEWHERE.get(self.prog, {}).get(flag)
        near = get_close_matches(flag, self._option_string_actions, n=1)
        said = here or (f"did you mean {near[0]}?" if near else "")
        return f"unrecognized arguments: {given}" + (f" ({said})" if said else "")
