"""Measure how near the kernels of Qwen3 come to what this machine could do: the table that
predictions rest on.

    python bench/efficiency.py --table atomc/cost/efficiency.json
    python bench/efficiency.py --models tiny --quick    # on any machine, a CPU too
    python bench/efficiency.py --compare bench/results/decode-h200.json --machine h200

Each distinct kernel of one layer and of the ends of the model is timed as in `atomc explain
--measure`. A row of the table is a line through what was measured of one kernel for one number of
tokens: time = floor + work / efficiency, where work is the larger of bytes / bandwidth and flops /
peak by the machine's data sheet. --limit ends the measuring after so many seconds; what comes first
matters most. Rows of kernels that were not met stay in the table of the machine. --compare measures
nothing, and runs anywhere: it holds the table that ships to steps that bench/decode.py measured.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from model_shapes import MODELS

from atomc.cost.efficiency import Table, Timing, fit, name_in_table, predict, shipped, work
from atomc.planning.device_model import Model, build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import TimedProgram, compile_for
from atomc.platform import Platform

# In this order: decode, prompts, decode after long contexts (of which only attention is new), long
# prompts.
LOADS = [
    Workload(1, 1, 1024),
    Workload(8, 8, 1024),
    Workload(64, 64, 1024),
    Workload(1024, 1, 1024),
    Workload(1, 1, 8192),
    Workload(8, 8, 8192),
    Workload(64, 64, 8192),
    Workload(256, 1, 256),
    Workload(8192, 8, 1024),
]
QUICK = [Workload(1, 1, 128), Workload(8, 8, 128)]


def model_of(name: str, scheme: str | None, layers: int | None) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**MODELS[name], "dtype": "bfloat16"}))
        return build_model(
            Path(folder), quantization=scheme, layers=layers, platform=Platform.detect()
        )


def timings(lowered: TimedProgram, load: Workload, known: set[tuple[Any, ...]]) -> Iterator[Timing]:
    """Of the kernels of a step that are not known for this number of tokens yet."""
    for p in predict(
        lowered.program.report.costs, lowered.program.report.kernels, lowered.platform, load.sizes
    ):
        key = p.op, p.kernel, load.tokens, p.bytes, p.flops
        if key not in known:
            known.add(key)
            (seconds,) = lowered.time_some(load, [p])
            least = work(lowered.platform, p.rate, p.bytes, p.flops)
            assert least is not None
            yield Timing(*name_in_table(p.op, p.kernel), load.tokens, least, seconds)


def measured(args: argparse.Namespace) -> tuple[list[Timing], list[str], Platform]:
    """The timings, and what --limit left out."""
    start, found, left_out = time.perf_counter(), list[Timing](), list[str]()
    runs = []
    for scheme in args.schemes:
        for name in args.models:
            lowered = TimedProgram(
                model_of(name, scheme if scheme != "bf16" else None, layers=1), {"glue": "eager"}
            )
            runs.append((f"{name} {scheme}", lowered, set[tuple[Any, ...]]()))
            print(
                f"{name} {scheme}: compiled after {time.perf_counter() - start:.1f} s",
                file=sys.stderr,
            )
    for load in QUICK if args.quick else LOADS:
        for name, lowered, known in runs:
            what = f"{name}, {load.tokens} tokens of {load.sequences} sequences of {load.context}"
            if time.perf_counter() - start > args.limit:
                left_out.append(what)
                continue
            for timing in timings(lowered, load, known):
                found.append(timing)
                print(
                    f"{what}: {timing.op} by {timing.kernel} {timing.seconds * 1e6:.2f} us, "
                    f"{timing.work / timing.seconds:.0%} of the peak",
                    flush=True,
                )
                if time.perf_counter() - start > args.limit:
                    left_out.append(f"the rest of {what}")
                    break
    print(
        f"{len(found)} kernels in {time.perf_counter() - start:.1f} s; left out: "
        f"{'; '.join(left_out) or 'nothing'}"
    )
    return found, left_out, runs[0][1].platform


def compare(table: Table, platform: Platform, file: str) -> None:
    """Print steps as bench/decode.py measured them beside what the table predicts."""
    steps = [
        step
        for step in map(json.loads, Path(file).read_text().splitlines())
        if step["what"] == "atomc"
    ]
    for name, scheme in dict.fromkeys((step["model"], step.get("quantization")) for step in steps):
        program = compile_for(model_of(name, scheme, None), platform, {"glue": "eager"})
        for step in steps:
            if (step["model"], step.get("quantization")) == (name, scheme):
                batch, context, tpot = step["batch"], step["context"], step["tpot_ms"]
                sizes = Workload(batch, batch, context).sizes
                found = predict(
                    program.report.costs, program.report.kernels, platform, sizes, table
                )
                ms = 1e3 * sum(p.seconds or 0.0 for p in found)
                print(
                    f"{name} {scheme or 'bf16'} decode {batch} x {context}: {tpot:.3f} ms, "
                    f"predicted {ms:.3f}, "
                    f"{ms / tpot - 1:+.0%}"
                )


def write(table: Table, file: Path) -> None:
    """Put the table among those of a file, over the one of its machine."""
    tables = (
        {old.machine: old for old in map(Table.of, json.loads(file.read_text()))}
        if file.exists()
        else {}
    )
    tables[table.machine] = table.over(tables[table.machine]) if table.machine in tables else table
    file.write_text(json.dumps([table.to_dict() for table in tables.values()], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="0.6b,8b", type=lambda text: text.split(","))
    parser.add_argument(
        "--schemes", default="bf16", type=lambda text: text.split(","), help="such as bf16,fp8"
    )
    parser.add_argument("--quick", action="store_true", help="two small steps only")
    parser.add_argument(
        "--limit", default=600.0, type=float, help="seconds after which no further step is measured"
    )
    parser.add_argument("--compare", metavar="FILE", help="what bench/decode.py wrote on --machine")
    parser.add_argument(
        "--machine", default="h200", help="with --compare: as in atomc explain --platform"
    )
    parser.add_argument("--json", help="write all timings to this file")
    parser.add_argument(
        "--table",
        help="put the table into this file, over the rows of the same machine and kernels",
    )
    args = parser.parse_args()
    if args.compare:
        platform = Platform.named(args.machine)
        compare(shipped()[platform.name], platform, args.compare)
        return
    command = (
        f"python bench/efficiency.py --models {','.join(args.models)} --schemes "
        f"{','.join(args.schemes)}"
    )
    found, left_out, platform = measured(args)
    source = f"{command}, torch {torch.__version__}"
    assert platform.bandwidth and platform.flops
    table = fit(found, platform.name, platform.bandwidth, platform.flops, source)
    if args.json:
        data = {
            "command": command,
            "device": platform.name,
            "torch": torch.__version__,
            "left_out": left_out,
            "timings": [asdict(timing) for timing in found],
        }
        Path(args.json).write_text(json.dumps(data, indent=1) + "\n")
    if args.table:
        write(table, Path(args.table))


if __name__ == "__main__":
    main()
