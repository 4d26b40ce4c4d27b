"""`atomc place-experts`: which rank should have which expert, from the tokens that each one got."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from atomc.cli.arguments import Commands, command
from atomc.files.file_of_flag import file_of_flag

if TYPE_CHECKING:
    from atomc.parallel.expert_placement import Placement


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "place-experts",
        run,
        "Place the experts of a mixture on ranks, equally many on each, so that ranks get similar "
        "numbers of tokens, and print the imbalance of each layer before and after.",
        "  atomc place-experts load.json --ranks 8\n"
        "  atomc place-experts load.json --ranks 8 -o placement.json\n"
        "  atomc serve path/to/model --dp 8 --ep --expert-placement placement.json",
    )
    parser.add_argument(
        "load",
        metavar="LOAD",
        help='how many tokens each expert got: {"tokens": {layer: [tokens of each expert]}}, as '
        "GET /experts answers",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="number of ranks among which --ep divides the experts: --tp, or --dp without --tp",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the placement, for --expert-placement; default: only print what it would do",
    )


def run(arguments: argparse.Namespace) -> None:
    from atomc.parallel.expert_placement import balanced, read_tokens, write_placement

    with file_of_flag("LOAD", arguments.load):
        load = read_tokens(Path(arguments.load))
    try:
        placement = {path: balanced(tokens, arguments.ranks) for path, tokens in load.items()}
    except ValueError as error:
        raise ValueError(f"{arguments.load}: {error}") from error
    print(_summary(load, placement, arguments.ranks))
    if arguments.output is not None:
        write_placement(Path(arguments.output), placement)
        print(f"\n{arguments.output}: ranks of the experts of {len(placement)} layers")


def _summary(load: dict[str, list[int]], placement: "Placement", num_ranks: int) -> str:
    """A row for each layer, and their mean."""
    from atomc.parallel.expert_placement import equal_ranges, imbalance
    from atomc.report.render.table import table

    before, after, rows = [], [], []
    for path, tokens in load.items():
        before.append(imbalance(tokens, equal_ranges(len(tokens), num_ranks), num_ranks))
        after.append(imbalance(tokens, placement[path], num_ranks))
        rows.append((path, f"{sum(tokens):,}", f"{before[-1]:.2f}", f"{after[-1]:.2f}"))
    means = (f"{sum(values) / len(values):.2f}" for values in (before, after))
    header = ("layer", "tokens", "ranges of ids", "placed")
    return (
        f"tokens of the busiest of {num_ranks} ranks, divided by the mean of the ranks:\n\n"
        + table(header, [*rows, ("mean of the layers", "", *means)], (1, 2))
    )
