"""Whether all ranks compile the same: the report of a group is that of rank 0."""

import hashlib
import logging
from itertools import zip_longest

from torch import distributed

from atomc.report.report_data import ReportData

log = logging.getLogger("atomc")
Lines = tuple[str, ...]


def compare_reports(report: ReportData, stage: int) -> None:
    """Write into the notes of the report whether those of the other ranks are equal; if not, also
    into the log. All ranks of the default process group call this.

    stage  ranks of other stages have other layers, and are not compared
    """
    lines = what_runs(report)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests: list[tuple[int, str]] = [(0, "")] * distributed.get_world_size()
    distributed.all_gather_object(digests, (stage, digest))
    if len(set(digests)) == len({stage for stage, _ in digests}):
        report.notes.append(f"all {len(digests)} ranks compiled the same: this report is of each")
        return
    lines_of_ranks: list[Lines] = [()] * len(digests)
    distributed.all_gather_object(lines_of_ranks, lines)
    for note in differences([stage for stage, _ in digests], lines_of_ranks):
        report.notes.append(note)
        log.error("%s", note)


def what_runs(report: ReportData) -> Lines:
    """What decides the numbers of a rank, in the order of its graph: rewrites with their sites,
    kernels by tokens. Without times, sizes in memory, and where a graph came from.
    """
    return (
        *(
            f"{site.rewrite} at {site.module_path} {sorted(site.attrs.items())}"
            for site in report.sites
        ),
        *(
            f"{each.op} at {each.module_path} for {each.tokens} tokens by {each.chosen}"
            for each in report.kernels
        ),
        *(f"{count} x {op}" for op, count in sorted(report.num_ops.items())),
    )


def differences(stages: list[int], lines_of_ranks: list[Lines]) -> list[str]:
    """A sentence for each rank that differs from the first one of its stage."""
    notes = []
    for rank, (stage, lines) in enumerate(zip(stages, lines_of_ranks, strict=True)):
        first = stages.index(stage)
        if lines == lines_of_ranks[first]:
            continue
        here, there = next(
            pair
            for pair in zip_longest(lines, lines_of_ranks[first], fillvalue="nothing")
            if len(set(pair)) > 1
        )
        notes.append(
            f"RANKS DIFFER: rank {rank} has {here}, where rank {first} has {there}; their results "
            "may not fit together: use the same version, options and GPUs for all ranks"
        )
    return notes
