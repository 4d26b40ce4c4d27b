"""Explains an exception of Dynamo: why a program cannot be traced as one graph, and the line of the
user's code.
"""

import ast
import re
from pathlib import Path
from traceback import FrameSummary
from typing import NamedTuple

import torch
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

from atomc.errors import first_line

_TORCH, _ATOMC = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
# Of atomc, only models count as user code, without the adapter for models of transformers.
_MODELS, _ADAPTER = f"{_ATOMC}/models/", f"{_ATOMC}/models/stock.py"
_UNKNOWN_NUMBER = re.compile(r"[Cc]ould not guard on data-dependent expression (.*?) \(unhinted")
_RAISED = re.compile(r"raised exception (\w+)\((.*)\)$", re.MULTILINE)
# torch 2.11 writes the arguments of an exception as a list of these.
_CONSTANT = re.compile(r"""ConstantVariable\(\w+: ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^()]*)\)""")
# What torch says in later lines: the error of a call with fake tensors.
_FAKE_CALL = re.compile(r": got (\w+)\(['\"](.*?)['\"],?\)$", re.MULTILINE | re.DOTALL)


class TraceFailure(NamedTuple):
    """where      "package/file.py:12", "" if unknown
    only_here  only the runtime fails, because it needs one graph for all lengths of a step;
               torch.compile in a user's program may guard on sizes and break the graph
    """

    reason: str
    where: str
    only_here: bool


def trace_failure(error: BaseException) -> TraceFailure:
    """The reason of an error of Dynamo or AOTAutograd."""
    text = str(error)
    reason = first_line(text).rstrip(".")
    stack = list(getattr(error, "real_stack", None) or ())
    frame = next((frame for frame in reversed(stack) if _is_user_code(frame)), None)
    where = f"{_short_path(frame.filename)}:{frame.lineno}" if frame else ""
    number = _UNKNOWN_NUMBER.search(text)
    if number is not None:
        code = f" in `{frame.line.strip()}`" if frame and frame.line else ""
        return TraceFailure(
            f"it branches on a number that is only known at run time, {number[1]}{code}",
            where,
            True,
        )
    if not isinstance(error, Unsupported):
        call = _FAKE_CALL.search(text)
        said = f"{call[1]}: {call[2]}" if call else f"{type(error).__name__}: {reason}"
        return TraceFailure(said, where, False)
    raised = _RAISED.search(text)
    if raised is None:
        return TraceFailure(f"torch.compile cannot trace it as one graph: {reason}", where, True)
    said = _text_of(raised[2])
    if stack and stack[-1].filename == _ADAPTER:
        return TraceFailure(said, where, True)
    return TraceFailure(f"it raises {raised[1]}" + f": {said}" * bool(said), where, False)


def _text_of(arguments: str) -> str:
    """The arguments of an exception as Dynamo writes them; without quotes if they are constants."""
    constants = _CONSTANT.sub(r"\1", arguments)
    try:
        values = ast.literal_eval(f"[{constants}]")
    except (ValueError, SyntaxError):
        return arguments
    if len(values) == 1 and isinstance(values[0], list):
        (values,) = values
    return ", ".join(map(str, values))


def raised_by_backend(error: BaseException) -> BaseException:
    """The exception of a backend that Dynamo wrapped; else the error itself."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def _is_user_code(frame: FrameSummary) -> bool:
    file = frame.filename
    if file.startswith(_ATOMC):
        return file.startswith(_MODELS) and file != _ADAPTER
    return not file.startswith(_TORCH)


def _short_path(file: str) -> str:
    """The path of a file relative to site-packages."""
    return file.rpartition("/site-packages/")[2]
