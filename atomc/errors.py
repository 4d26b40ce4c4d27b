"""The errors a caller may want to catch, and parts of their texts."""

from collections.abc import Iterable
from difflib import get_close_matches


class OptionsError(ValueError):
    """An option that does not exist, has a wrong value, or cannot take effect."""


class ContractError(ValueError):
    """The graph does not keep what `expect` promises."""


class RunError(RuntimeError):
    """A compiled model was called in a way that it cannot serve."""


class SharingError(RunError):
    """Dynamo took one prepared layer for another."""


OURS = (OptionsError, ContractError, RunError)


def suggestion(name: str, names: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" with the most similar of `names`; "" if none is similar."""
    near = get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def first_line(text: object) -> str:
    """The first line of an exception's text, or of another one, with the next one if it ends with a
    colon; "" if it is empty. The rest is often a traceback, or the state of a library.
    """
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
