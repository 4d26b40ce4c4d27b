"""Why Dynamo could not make one graph of a program, out of what it raised: a reason, and a line of the user's code."""

import re
from pathlib import Path
from traceback import FrameSummary
from typing import NamedTuple

import torch
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

_TORCH, _ATOMC = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
# Of atomc's files only models are a user's code, and not the adapter of transformers' models.
_MODELS, _ADAPTER = f"{_ATOMC}/models/", f"{_ATOMC}/models/stock.py"
_UNKNOWN_NUMBER = re.compile(r"[Cc]ould not guard on data-dependent expression (.*?) \(unhinted")
_RAISED = re.compile(r"raised exception (\w+)\((.*)\)$", re.MULTILINE)


class Untraceable(NamedTuple):
    """where   "package/file.py:12", "" if unknown
    only_here  the runtime is in the way, which needs one graph for steps of every length: a compile in a user's own
               program may guard on sizes and break the graph
    """

    reason: str
    where: str
    only_here: bool


def untraceable(error: BaseException) -> Untraceable:
    """What an error of Dynamo's, or of AOTAutograd's, says about the program."""
    text = str(error)
    first_line = next(iter(text.splitlines()), "").rstrip(".")
    stack = list(getattr(error, "real_stack", None) or ())
    frame = next((frame for frame in reversed(stack) if _is_users(frame)), None)
    where = f"{_shown(frame.filename)}:{frame.lineno}" if frame else ""
    number = _UNKNOWN_NUMBER.search(text)
    if number is not None:
        code = f" in `{frame.line.strip()}`" if frame and frame.line else ""
        return Untraceable(f"it decides by a number that is known only when it runs, {number[1]}{code}", where, True)
    if not isinstance(error, Unsupported):
        return Untraceable(f"{type(error).__name__}: {first_line}", where, False)
    raised = _RAISED.search(text)
    if raised is None:
        return Untraceable(f"torch.compile cannot make one graph of it: {first_line}", where, True)
    said = raised[2].strip("'\"")
    if stack and stack[-1].filename == _ADAPTER:
        return Untraceable(said, where, True)
    return Untraceable(f"it raises {raised[1]}: {said}", where, False)


def raised_by_backend(error: BaseException) -> BaseException:
    """What a backend raised, if Dynamo's error stands for that; else the error."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def _is_users(frame: FrameSummary) -> bool:
    file = frame.filename
    if file.startswith(_ATOMC):
        return file.startswith(_MODELS) and file != _ADAPTER
    return not file.startswith(_TORCH)


def _shown(file: str) -> str:
    """A file of an installed package without the folder of packages."""
    return file.rpartition("/site-packages/")[2]
