"""The command line: `atomc generate`, `atomc explain`, `atomc audit`, `atomc diff`, `atomc serve`,
...

Slow modules are imported only when a command runs. Errors that a user can cause are one line on
stderr, with exit code 2.
"""

import argparse
import importlib.metadata
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from atomc.cli import audit, bench, diff, doctor, explain, generate, place_experts, run_batch, serve
from atomc.cli.parser import CommandParser, PrintCompletion
from atomc.options import let_openmp_sleep
from atomc.tested_versions import warn_of_untested

COMMANDS = {
    "generate": generate,
    "explain": explain,
    "audit": audit,
    "diff": diff,
    "serve": serve,
    "run-batch": run_batch,
    "place-experts": place_experts,
    "bench": bench,
    "doctor": doctor,
}
# Modules whose distribution has another name, or comes with another one.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "opentelemetry": "opentelemetry-sdk",
    "pydantic": "fastapi",
    "starlette": "fastapi",
    "zmq": "pyzmq",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    let_openmp_sleep()
    warn_of_untested()
    try:
        code: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `atomc explain | head`; Python flushes stdout again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # errors that a user cannot cause are raised again
        user_error = _user_error(error)
        if user_error is None:
            raise
        print(f"atomc: {' '.join(str(user_error).split())}", file=sys.stderr)
        return 2
    return code or 0


def _user_error(error: BaseException) -> BaseException | None:
    """The error if a user can cause it, else None; unwraps errors that Dynamo raises."""
    from atomc.errors import RunError
    from atomc.runtime.requests.request_errors import RequestFailed

    inner = getattr(error, "inner_exception", None)
    if inner is not None:
        return _user_error(inner)
    if isinstance(error.__cause__, ValueError) and type(error).__name__ == "PassError":
        return error
    if isinstance(error, ModuleNotFoundError) and (extra := _extra_of(error.name or "")):
        return ImportError(f"this needs the library {error.name}: pip install 'atomc[{extra}]'")
    user_errors = (ValueError, OSError, ImportError, RunError, RequestFailed)
    return error if isinstance(error, user_errors) else None


def _extra_of(module: str) -> str | None:
    """The first extra of atomc's metadata that installs a top-level module, or None."""
    name = DISTRIBUTIONS.get(module.partition(".")[0], module.partition(".")[0])
    try:
        requirements = importlib.metadata.requires("atomc") or ()
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path has no metadata
        return None
    for requirement in requirements:
        library, _, marker = requirement.partition(";")
        library = re.split(r"[^\w-]", library.strip())[0]
        extra = re.search(r"extra == [\"'](\w+)", marker)
        if extra and library.replace("-", "_").lower() == name.replace("-", "_").lower():
            return extra[1]
    return None


def _parser() -> argparse.ArgumentParser:
    version = import_module("atomc").__version__
    parser = CommandParser(
        "atomc",
        description="A torch.compile backend for language models that explains what it does.",
    )
    parser.add_argument("--version", action="version", version=f"atomc {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for module in COMMANDS.values():
        module.add(commands)
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands and flags in this shell",
    )
    return parser
