"""Shared code of the commands: adding a parser, and common arguments."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    # What argparse's add_subparsers returns.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

DTYPES = ("float32", "bfloat16", "float16")
GLUES = ("eager", "inductor", "auto")
# The names in atomc.quantization.ONLINE, which is too slow to import for parsing arguments.
SCHEMES = ("fp8", "fp8_per_token", "fp8_block", "int8", "int4", "mxfp4", "mxfp4_a16", "nvfp4_a16")


def command(
    commands: "Commands",
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


def add_quantization(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--quantization", choices=SCHEMES, metavar="SCHEME", help=f"{what}: {', '.join(SCHEMES)}"
    )


def dtype_named(name: str | None) -> "torch.dtype | None":
    import torch

    return getattr(torch, name) if name else None


def default_glue(device: str | None) -> str:
    """ "auto" with a GPU; "eager" on a CPU, where Inductor would run a C++ compiler."""
    import torch

    return "auto" if device != "cpu" and torch.cuda.is_available() else "eager"
