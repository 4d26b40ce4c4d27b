"""Which rank has which expert of a mixture: a placement is balanced by the tokens that each expert
got, written to a file, and read again when a model is loaded.

The file is a JSON object: the path of a layer's experts -> for each expert, its rank.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atomc.files.json_types import json_kind
from atomc.parallel.sizes import check_that_experts_divide

Ranks = tuple[int, ...]  # of each expert
Placement = Mapping[str, Ranks]  # by the path of a layer's experts
REMEDY = "`atomc place-experts` writes such a file"


def equal_ranges(num_experts: int, num_ranks: int) -> Ranks:
    """The placement of a layer that has none: equal ranges of ids, by rank. Raises ValueError if
    they do not divide.
    """
    check_that_experts_divide(num_experts, num_ranks)
    held = num_experts // num_ranks
    return tuple(expert // held for expert in range(num_experts))


def balanced(tokens: Sequence[int], num_ranks: int) -> Ranks:
    """The rank of each expert, of which all ranks have equally many, so that ranks get similar
    numbers of tokens: longest processing time first (Graham 1969), on ranks that have room.

    tokens  that each expert got

    The same for the same numbers; equal ranges of ids, if these are as good. Raises ValueError if
    the experts do not divide.
    """
    ranges = equal_ranges(len(tokens), num_ranks)
    room = [len(tokens) // num_ranks] * num_ranks
    sums, placed = [0] * num_ranks, [0] * len(tokens)
    for expert in sorted(range(len(tokens)), key=lambda number: -tokens[number]):
        rank = min((r for r in range(num_ranks) if room[r]), key=lambda r: sums[r])
        placed[expert] = rank
        sums[rank] += tokens[expert]
        room[rank] -= 1
    better = max(sums) < max(tokens_of_ranks(tokens, ranges, num_ranks))
    return tuple(placed) if better else ranges


def tokens_of_ranks(tokens: Sequence[int], ranks: Ranks, num_ranks: int) -> list[int]:
    """How many tokens each rank gets."""
    sums = [0] * num_ranks
    for count, rank in zip(tokens, ranks, strict=True):
        sums[rank] += count
    return sums


def imbalance(tokens: Sequence[int], ranks: Ranks, num_ranks: int) -> float:
    """Tokens of the busiest rank, divided by the mean of the ranks; 1.0 without tokens."""
    total = sum(tokens)
    return max(tokens_of_ranks(tokens, ranks, num_ranks)) * num_ranks / total if total else 1.0


def read_tokens(file: Path) -> dict[str, list[int]]:
    """How many tokens each expert got, by the path of the layer's experts: from what a server
    answers to GET /experts, or only its "tokens". Raises ValueError for other content, and OSError
    if the file cannot be read.
    """
    by_path = _read_object(file, "the answer to GET /experts of a server with --expert-load")
    by_path = by_path["tokens"] if isinstance(by_path.get("tokens"), dict) else by_path
    for path, tokens in by_path.items():
        if not _are_counts(tokens):
            raise ValueError(
                f"{file} has {_short(tokens)} for {path!r}, expected the number of tokens of each "
                "expert, as GET /experts of a server with --expert-load answers"
            )
    if not by_path:
        raise ValueError(f"{file} has no layers: start the server with --expert-load")
    return by_path


def write_placement(file: Path, placement: Placement) -> None:
    """Write a placement, a line for each layer."""
    lines = (f"  {json.dumps(path)}: {json.dumps(ranks)}" for path, ranks in placement.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_placement(file: Path, num_ranks: int) -> dict[str, Ranks]:
    """The placement in the file. Raises ValueError unless each layer has equally many experts on
    each of so many ranks, and OSError if the file cannot be read.
    """
    by_path = _read_object(file, "a placement of experts")
    for path, ranks in by_path.items():
        try:
            _check_layer(ranks, num_ranks)
        except ValueError as error:
            raise ValueError(f"{file}: {path}: {error}; {REMEDY}") from error
    return {path: tuple(ranks) for path, ranks in by_path.items()}


def _check_layer(ranks: Any, num_ranks: int) -> None:
    if not _are_counts(ranks):
        raise ValueError(f"{_short(ranks)} is not a list with the rank of each expert")
    outside = next((expert for expert, rank in enumerate(ranks) if rank >= num_ranks), None)
    if outside is not None:
        raise ValueError(
            f"expert {outside} is on rank {ranks[outside]}, but there are {num_ranks} ranks, "
            f"0 to {num_ranks - 1}"
        )
    held = [ranks.count(rank) for rank in range(num_ranks)]
    if min(held) != max(held):
        counts = ", ".join(map(str, held))
        raise ValueError(f"the ranks have {counts} experts, expected equally many on each")


def check_placement(placement: Placement, num_experts: Mapping[str, int]) -> None:
    """Raise ValueError for a layer that a model does not have, or another number of experts.

    num_experts  of the model, by the path of the layer's experts
    """
    for path, ranks in placement.items():
        if path not in num_experts:
            raise ValueError(
                f"expert_placement has {path!r}, which are no experts of this model; expected are "
                f"{_listed(list(num_experts))}; {REMEDY}"
            )
        if len(ranks) != num_experts[path]:
            raise ValueError(
                f"expert_placement has ranks of {len(ranks)} experts for {path}, which has "
                f"{num_experts[path]}; {REMEDY}"
            )


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]}, {paths[1]} to {paths[-1]}"


def _read_object(file: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{file} is not JSON ({error}), expected {what}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} has {json_kind(content)}, expected an object: {what}")
    return content


def _are_counts(value: Any) -> bool:
    """Whether the value is a list of integers that are not negative, and has some."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(count) is int and count >= 0 for count in value)
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
