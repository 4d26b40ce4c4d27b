"""`atomc diff`: what differs between two dumps."""

import argparse
from pathlib import Path
from typing import Any

from atomc.cli.arguments import command


def add(commands: Any) -> None:
    parser = command(
        commands, "diff", run,
        "Compare two dumps, of other versions, ranks or machines, by what they compute: ops, attributes, shapes, modules, "
        "and who reads what. Exit code 1 if they differ.",
        "  atomc explain --dump before; git pull; atomc explain --dump after\n  atomc diff before after\n"
        "  atomc diff before/graph_0 after/graph_0 --all",
    )  # fmt: skip
    parser.add_argument("first", type=Path, help="a folder that --dump wrote, a graph in it, or one file")
    parser.add_argument("second", type=Path, help="what to compare with")
    parser.add_argument("--all", action="store_true", help="the details of every stage, not only of the first that differs")


def run(arguments: argparse.Namespace) -> int:
    from atomc.dumps.diff import differences

    for path in (arguments.first, arguments.second):
        if not path.exists():
            raise ValueError(f"there is no {path}")
    found = differences(arguments.first, arguments.second, every_stage=arguments.all)
    print("\n".join(found) if found else "equal")
    return int(bool(found))
