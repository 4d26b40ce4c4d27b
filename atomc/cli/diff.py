"""`atomc diff`: compares two dumps."""

import argparse
from pathlib import Path

from atomc.cli.arguments import Commands, add_switch, command


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "diff",
        run,
        "Compare the graphs of two dumps, such as of two versions, ranks or machines: ops, "
        "attributes, shapes, modules and edges. Exit code 1 if they differ.",
        "  atomc explain --dump before; git pull; atomc explain --dump after\n  atomc diff "
        "before after\n"
        "  atomc diff before/graph_0 after/graph_0 --all",
    )
    parser.add_argument(
        "first", type=Path, help="a directory written by --dump, one of its graphs, or one file"
    )
    parser.add_argument("second", type=Path, help="the dump to compare with")
    add_switch(parser, "--all", "details of every stage, not only of the first that differs")


def run(arguments: argparse.Namespace) -> int:
    from atomc.dumps.diff import differences

    for path in (arguments.first, arguments.second):
        if not path.exists():
            raise ValueError(f"{path} does not exist")
    lines = differences(arguments.first, arguments.second, every_stage=arguments.all)
    print("\n".join(lines) if lines else "equal")
    return int(bool(lines))
