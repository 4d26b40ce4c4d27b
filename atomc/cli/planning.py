"""Planning in `atomc explain`: kernels, bytes, time and memory of one step, also for a machine that
is not present.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atomc.cli.arguments import add_number, add_switch, dtype_named
from atomc.files.file_of_flag import file_of_flag
from atomc.files.json_types import JSONLike
from atomc.runtime.config import DTYPES, SCHEMES

if TYPE_CHECKING:
    from atomc.cost.efficiency import Table
    from atomc.parallel.process_group import PipelineStage
    from atomc.planning.device_model import Model
    from atomc.planning.plan_report import StepPlan, Workload

# Flags that cannot be combined with a plan.
INCOMPATIBLE_FLAGS = ("why", "html", "beside", "save", "check", "dynamic", "options")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a plan."""
    group = parser.add_argument_group(
        "a plan of one step of a config.json; each of these flags requests it"
    )
    add_switch(group, "--plan", "plan a step that decodes one token after 1023")
    add_switch(group, "--measure", "time each kernel on this machine, next to its prediction")
    add_number(group, "--tp", "tensor parallelism over N devices")
    add_number(group, "--pp", "pipeline parallelism in N stages, each over the devices of --tp")
    add_switch(
        group,
        "--ep",
        "the devices of --tp have some of the experts each; without --tp, those of --dp",
    )
    add_number(
        group,
        "--dp",
        "with --ep: N devices that each have the step's tokens and sequences, and share the "
        "experts",
    )
    add_number(
        group,
        "--tokens",
        "new tokens in the step; default: one per sequence, and its drafts",
        metavar="T",
    )
    add_number(group, "--sequences", "sequences in the step; default: 1", metavar="S")
    add_number(
        group, "--context", "sequence length including new tokens; default: 1024", metavar="C"
    )
    add_number(
        group,
        "--max-model-len",
        "maximum sequence length, to compute how many sequences fit; default: the model's",
    )
    group.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), help="the dtype of the KV cache"
    )
    group.add_argument(
        "--speculative",
        choices=("mtp",),
        help="with the draft steps of the checkpoint's draft layers after the step",
    )
    add_number(
        group,
        "--speculative-tokens",
        "draft tokens per step, with --speculative; default: 1",
        metavar="K",
    )
    group.add_argument(
        "--efficiency",
        metavar="FILE",
        help="a table written by bench/efficiency.py; default: atomc's "
        "table for the machine, if there is one",
    )
    parser.set_defaults(plan_flags=[action.dest for action in group._group_actions])


def is_requested(arguments: argparse.Namespace) -> bool:
    values = [getattr(arguments, name) for name in arguments.plan_flags]
    return any(value is not None and value is not False for value in values)  # 0 is a number


def run(arguments: argparse.Namespace) -> int:
    """Print the compiler's report and the plan. Raises ValueError for a model without one."""
    from atomc.demo import PATH
    from atomc.report.report import reports
    from atomc.runtime.execution.loading.hub import model_folder

    others = [
        f"--{name}" for name in INCOMPATIBLE_FLAGS if getattr(arguments, name) not in (None, False)
    ]
    if others:
        raise ValueError(f"a plan cannot be combined with {', '.join(others)}, only with --json")
    name = str(arguments.model or PATH)
    if ":" in name and not Path(name).exists():
        raise ValueError(f"a plan needs a config.json; {name} is a function")
    earlier = {id(report): report for report in reports()}
    with contextlib.redirect_stdout(sys.stderr):
        plan = _plan_of(model_folder(name, weights=False), arguments)
    added = [report for report in reports() if id(report) not in earlier]
    first, *of_draft = added if arguments.speculative else added[-1:]
    if plan.pipeline is not None:
        first = reports()[-len(plan.pipeline.stages) :][plan.pipeline.planned]
    if arguments.json:
        results = [
            first.to_dict() | {"plan": plan.to_dict()},
            *(report.to_dict() for report in of_draft),
        ]
        print(json.dumps(results, indent=1, default=str))
    else:
        texts = [*(report.to_text() for report in (first, *of_draft)), plan.to_text()]
        print("\n".join(texts).rstrip())
    return 0


def model_of(
    folder: Path, arguments: argparse.Namespace, stage: "PipelineStage | None" = None
) -> "Model":
    """The model of a config.json on the meta device, with --dtype, --quantization, --layers and
    --tp, --ep and --dp applied; all its layers, or those of a stage.
    """
    from atomc.planning.device_model import build_model
    from atomc.platform import Platform

    scheme = arguments.dtype if arguments.dtype in SCHEMES else arguments.quantization
    if arguments.quantization and arguments.quantization != scheme:
        raise ValueError(
            f"--dtype {scheme} and --quantization {arguments.quantization} differ: leave one "
            "of them out"
        )
    dtype = dtype_named(arguments.dtype) if arguments.dtype in DTYPES else None
    platform = Platform.named(arguments.platform) if arguments.platform else None
    return build_model(
        folder,
        dtype=dtype,
        quantization=scheme,
        devices=1 if arguments.tp is None else arguments.tp,
        layers=arguments.layers,
        platform=platform,
        drafts=_drafts(arguments),
        stage=stage,
        ep=arguments.ep,
        data_ranks=_data_ranks(arguments),
    )


def _data_ranks(arguments: argparse.Namespace) -> int:
    """So many times the devices of --tp share only the experts."""
    dp: int | None = arguments.dp
    one = arguments.tp is None or arguments.tp == 1
    if dp is not None and (not arguments.ep or dp < 1):
        raise ValueError(
            f"--dp {dp}: a plan is of one engine; with --ep, its devices share the experts"
        )
    if arguments.ep and one and (dp is None or dp == 1):
        raise ValueError("--ep divides the experts among devices: set --tp or --dp to their number")
    if dp is not None and (arguments.pp is not None or arguments.speculative):
        raise ValueError("--dp with --ep is not supported with --pp and --speculative mtp")
    return dp or 1


def _drafts(arguments: argparse.Namespace) -> int:
    """Draft tokens per step; 0 without a draft layer."""
    count: int | None = arguments.speculative_tokens
    if arguments.speculative is None and count is not None:
        raise ValueError(f"--speculative-tokens {count} needs --speculative mtp in a plan")
    if count is not None and count < 1:
        raise ValueError(f"--speculative-tokens {count}: expected at least 1")
    return 0 if arguments.speculative is None else count or 1


def _plan_of(folder: Path, arguments: argparse.Namespace) -> "StepPlan":
    from atomc.planning.stages import plan_stages
    from atomc.planning.step_plan import measure_step, plan_step
    from atomc.platform import Platform

    if arguments.measure and arguments.platform:
        raise ValueError(
            f"--measure times this machine, not --platform {arguments.platform}: leave one of "
            "them out"
        )
    options: dict[str, JSONLike] = {"dump": arguments.dump} if arguments.dump else {}
    if arguments.kv_cache_dtype:
        options["kv_cache_dtype"] = arguments.kv_cache_dtype
    platform = Platform.named(arguments.platform) if arguments.platform else Platform.detect()
    load, table = _load(arguments), _table(arguments.efficiency, platform.name)
    if arguments.measure:
        if arguments.pp is not None:
            raise ValueError(f"--measure times one device: leave out it or --pp {arguments.pp}")
        return measure_step(
            model_of(folder, arguments),
            load,
            longest=arguments.max_model_len,
            options=options,
            table=table,
        )

    def planned(model: "Model") -> "StepPlan":
        return plan_step(
            model, platform, load, longest=arguments.max_model_len, options=options, table=table
        )

    if arguments.pp is None or arguments.pp == 1:
        return planned(model_of(folder, arguments))
    if arguments.pp < 1:
        raise ValueError(f"--pp {arguments.pp}: expected at least 1")
    if arguments.speculative:
        raise ValueError("--pp is not supported with --speculative mtp: leave one of them out")
    return plan_stages(
        arguments.pp, lambda stage: model_of(folder, arguments, stage), planned, platform
    )


def _load(arguments: argparse.Namespace) -> "Workload":
    from atomc.planning.plan_report import Workload

    sequences = 1 if arguments.sequences is None else arguments.sequences
    return Workload(
        sequences * (1 + _drafts(arguments)) if arguments.tokens is None else arguments.tokens,
        sequences,
        1024 if arguments.context is None else arguments.context,
    )


def _table(file: str | None, machine: str) -> "Table | None":
    """The table of this machine in a file written by bench/efficiency.py."""
    from atomc.cost.efficiency import tables

    if file is None:
        return None
    with file_of_flag("--efficiency", file):
        by_machine = tables(Path(file))
    if machine not in by_machine:
        raise ValueError(
            f"--efficiency {file} has no table for {machine}, only for "
            f"{', '.join(by_machine) or 'no machine'}"
        )
    return by_machine[machine]
