"""Shared code of the commands: adding a parser, and common arguments."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from atomc.runtime.config import DTYPES, SCHEMES

if TYPE_CHECKING:
    import torch

# What argparse's add_subparsers returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

GLUES = ("eager", "inductor", "auto")
RUNTIME = "compile with a paged KV cache, as `atomc generate` does"


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
    examples: str,
) -> argparse.ArgumentParser:
    """Adds a parser for the command `name`, which calls `run(arguments)`."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_switch(parser: argparse._ActionsContainer, flag: str, text: str) -> None:
    parser.add_argument(flag, action="store_true", help=text)


def add_number(
    parser: argparse._ActionsContainer,
    flag: str,
    text: str,
    *,
    default: float | None = None,
    kind: Callable[[str], float] = int,
    metavar: str | None = None,
) -> None:
    """text: the default is added to it."""
    if default is not None:
        text = f"{text} (default: %(default)s)" if text else "default: %(default)s"
    metavar = metavar or ("X" if kind is float else "N")
    parser.add_argument(flag, type=kind, default=default, metavar=metavar, help=text)


def add_dump(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dump", metavar="DIR", help="write one runnable file per pass that changed the graph"
    )


def add_glue(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--glue", choices=GLUES, help=f"what runs the ops without a kernel; default: {default}"
    )


def add_quantization(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--quantization", choices=SCHEMES, metavar="SCHEME", help=f"{what}: {', '.join(SCHEMES)}"
    )


def dtype_named(name: str | None) -> "torch.dtype | None":
    """The dtype of a name in DTYPES; None for none, and for auto."""
    import torch

    torch_name = DTYPES[name or "auto"]
    return None if torch_name is None else getattr(torch, torch_name)


def default_glue(device: str | None) -> str:
    """ "auto" with a GPU; "eager" on a CPU, where Inductor would run a C++ compiler."""
    import torch

    return "auto" if device != "cpu" and torch.cuda.is_available() else "eager"
