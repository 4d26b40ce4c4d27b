"""Time the first call of a Qwen3 of small width and real depth, by phase: what compiling costs per
layer.

    python bench/compile_time.py --glue eager --repeat 2 --json bench/results/compile-time-cpu.json

Each case is a process of its own: a cold start with empty caches, with --warm a second one, which
finds what the first kept. Ways:
    program      atomc.program.compile_model, as the runtime compiles: traced once, no guards
    prepared     torch.compile(atomc.prepare(model), backend="atom")
    unprepared   torch.compile(model, backend="atom")
    inductor     torch.compile(model, backend="inductor")
The first three with `glue`: "eager" compiles no C++, "inductor" compiles each unique piece. `ours`
is all that happens after Dynamo has handed over the graph. `cpu` is the processor time of
the whole, which says more than `total` on a machine with other work; of --repeat runs that with the
least is shown. Below the table: how many times as long Dynamo and capture (dynamo + lift + trace)
take as with the fewest layers.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEPTHS = (2, 28, 64)
CASES = [
    ("program", "eager"),
    ("prepared", "eager"),
    ("unprepared", "eager"),
    ("program", "inductor"),
    ("prepared", "inductor"),
    ("unprepared", "inductor"),
    ("inductor", ""),
]
PHASES = (
    "dynamo",
    "cache",
    "lift",
    "trace",
    "passes",
    "lower",
    "glue",
    "rest",
    "ours",
    "total",
    "cpu",
)
TINY = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    hidden_act="silu",
)


def measure(way: str, glue: str, depth: int) -> dict[str, Any]:
    """Seconds by phase, of one first call."""
    import torch

    import atomc
    from atomc.backend import atom
    from atomc.loading.create_model import create_model
    from atomc.program import compile_model
    from atomc.weights.parameters import allocate_buffers, fill_randomly

    model = create_model(TINY | {"num_hidden_layers": depth}, torch.float32, "meta")
    allocate_buffers(model, "cpu")
    fill_randomly(model, "cpu")
    model.eval().requires_grad_(False)
    cpu = time.process_time()
    if way == "program":
        start = time.perf_counter()
        program = compile_model(model, {"glue": glue, "strict": True})
        total = time.perf_counter() - start
        return finished(total, cpu, dict(program.report.phases), program.report)
    if way == "prepared":
        atomc.prepare(model)
    called: list[float] = []

    def timed(gm: Any, inputs: Any) -> Any:
        called.append(time.perf_counter())
        if way == "inductor":
            from torch._inductor.compile_fx import compile_fx

            made = compile_fx(gm, inputs)
        else:
            made = atom(gm, inputs, options={"glue": glue, "strict": True})
        called.append(time.perf_counter())
        return made

    ids, positions = torch.arange(12), torch.arange(12)
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(positions, 0)
    with torch.inference_mode():
        start = time.perf_counter()
        torch.compile(model, backend=timed, fullgraph=True)(ids, positions)
        total = time.perf_counter() - start
    if way == "inductor":
        return finished(
            total, cpu, {"dynamo": called[0] - start, "glue": called[1] - called[0]}, None
        )
    report = atomc.reports()[-1]
    found = finished(total, cpu, {"dynamo": called[0] - start, **report.phases}, report)
    return {**found, "ours": called[1] - called[0]}


def finished(total: float, cpu: float, phases: dict[str, float], report: Any) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    notes = [note for note in report.notes if "traced" in note or "piece" in note] if report else []
    compiled = sum(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("miss", "bypass"))
    asked = counters["aot_autograd"]["total"]
    if report:
        notes.append(f"cache: {report.cache}")
    notes.append(f"Inductor was asked {asked} times and compiled {compiled}")
    used = {"total": total, "cpu": time.process_time() - cpu}
    return {
        **phases,
        "rest": total - sum(phases.values()),
        "ours": sum(phases.values()) - phases.get("dynamo", 0.0),
        **used,
        "notes": notes,
    }


def starts(way: str, glue: str, depth: int, limit: float, warm: bool) -> list[dict[str, Any]]:
    """A cold start, and a warm one if asked for; "start" says which."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "ATOMC_CACHE_DIR": f"{folder}/atomc",
            "ATOMC_CACHE": "1",
        }
        return [
            {"start": start, **in_a_process(way, glue, depth, limit, caches)}
            for start in ["cold"] + ["warm"] * warm
        ]


def in_a_process(
    way: str, glue: str, depth: int, limit: float, caches: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", way, glue, str(depth)]
    try:
        done = subprocess.run(
            command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return {"notes": [f"more than {limit:.0f} s"]}
    if done.returncode:
        return {"notes": [f"failed: {done.stderr.strip().splitlines()[-1]}"]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def row(way: str, glue: str, depth: int, found: dict[str, Any]) -> str:
    cells = "".join(f"{found[name]:8.2f}" if name in found else f"{'':8}" for name in PHASES)
    return f"{way:11}{glue:9}{found['start']:5}{depth:7}{cells}  {'; '.join(found['notes'])}"


def growth(results: list[dict[str, Any]]) -> list[str]:
    """For each way, glue and start: Dynamo and capture at each depth, in units of what they take at
    the least.
    """
    taken: dict[tuple[str, str, str], dict[int, float]] = {}
    for found in results:
        if "trace" in found:
            seconds = sum(found[phase] for phase in ("dynamo", "lift", "trace"))
            taken.setdefault((found["way"], found["glue option"], found["start"]), {})[
                found["layers"]
            ] = seconds
    return [
        f"{' '.join(which)}: Dynamo and capture "
        + ", ".join(
            f"{layers} layers {seconds / by_depth[min(by_depth)]:.2f}x"
            for layers, seconds in by_depth.items()
        )
        for which, by_depth in taken.items()
        if len(by_depth) > 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--ways", nargs="+", help="only these")
    parser.add_argument("--glue", nargs="+", help="only these")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="seconds after which a case is given up"
    )
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case")
    parser.add_argument("--warm", action="store_true", help="a second start of each case, too")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        way, glue, depth = given.one
        print(json.dumps(measure(way, glue, int(depth))))
        return
    import torch

    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
    print(f"{' '.join(['python', *sys.argv])}\n{machine}; seconds of the first call\n")
    print(
        f"{'way':11}{'glue':9}{'start':5}{'layers':>7}" + "".join(f"{name:>8}" for name in PHASES)
    )
    results = []
    for way, glue in CASES:
        for depth in given.depths:
            if (given.ways and way not in given.ways) or (given.glue and glue not in given.glue):
                continue
            runs = [starts(way, glue, depth, given.limit, given.warm) for _ in range(given.repeat)]
            for same in zip(*runs, strict=True):
                found = min(same, key=lambda run: run.get("cpu", float("inf")))
                results.append({"way": way, "glue option": glue, "layers": depth, **found})
                print(row(way, glue, depth, found), flush=True)
            if given.json:
                given.json.write_text(
                    json.dumps({"machine": machine, "results": results}, indent=1) + "\n"
                )
    print("", *growth(results), sep="\n")


if __name__ == "__main__":
    main()
