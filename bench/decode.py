"""Time of one decode step: the runtime's step under a CUDA graph beside transformers, on random
weights.

    python bench/decode.py --model 0.6b --batches 1,8,64 --json bench/results/decode-h200.json
    python bench/decode.py --model 0.6b --profile          # the kernels of one step, by time
    python bench/decode.py --model 8b --quantization fp8 --batches 1 --prefill 64

A step is one replay of the captured model and the argmax of its logits, each sequence at --context
tokens, in milliseconds, median of --steps steps timed with device events. Of transformers, tpot_ms
has the host's part of a call, and unwaited_ms is the mean of calls that the host does not wait for.
Prefill is one sequence of --context tokens; with --prefill N, also N of them in one step.
--quantization: the linear layers in few bits (docs/quantization.md).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_shapes import MODELS

from atomc.loading.loader import load
from atomc.ops.state import groups_of
from atomc.program import compile_model
from atomc.quantization.scheme import ONLINE
from atomc.runtime.execution.input_batch import StepShape
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

BLOCK = 16


def milliseconds(call: Callable[[], Any], steps: int) -> float:
    """Median device time of a call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def unwaited(call: Callable[[], Any], steps: int) -> float:
    """Milliseconds of each of so many calls, the host waiting for the last one only."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def step_of(lengths: list[int], new: list[int], blocks: int, groups: int) -> ScheduledStep:
    """A step in which sequence s gets its last new[s] of lengths[s] tokens; its blocks lie
    scattered, equally in each of the groups of layers that share block tables.
    """
    count = len(lengths)
    tables = (
        torch.randperm(count * blocks, generator=torch.Generator().manual_seed(0))
        .view(count, blocks)
        .tolist()
    )
    tokens = torch.randint(0, 1000, (sum(new),)).tolist()
    return ScheduledStep(
        tuple(
            Chunk(
                str(s),
                s,
                tuple(tokens[:n]),
                length - n,
                ((0, tuple(table)),) * groups,
                num_samples=1,
                num_output_rows=1,
            )
            for s, (length, n, table) in enumerate(zip(lengths, new, tables, strict=True))
        )
    )


def ours(args: argparse.Namespace, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        model = load(
            folder,
            dtype=torch.bfloat16,
            device="cuda",
            load_format="dummy",
            quantization=args.quantization,
            progress=False,
        )
    passes = dict.fromkeys(args.on, True)
    program = compile_model(model, {"glue": args.glue, "passes": passes}, owned=True)
    compiled = time.perf_counter() - start
    blocks = -(-(args.context + 64) // BLOCK)
    batches = args.batches
    most = max(*batches, args.prefill)
    runner = Runner(
        Programs({"text": program}),
        num_blocks=most * blocks,
        block_size=BLOCK,
        max_num_seqs=most,
        max_num_rows=max(args.context * max(1, args.prefill), *batches),
        max_columns=blocks,
    )
    step = partial(step_of, blocks=blocks, groups=len(groups_of(program.specs)))
    for caches in runner.caches:
        for cache in caches.values():
            cache.normal_()
    prefill = StepShape(args.context, 1, 1, blocks)
    runner.capture([prefill, *(StepShape(batch, batch, batch, blocks) for batch in batches)])
    if args.report:
        print(program.report.to_text(), file=sys.stderr)
    for batch in batches:
        runner.logits(step([args.context + 1] * batch, [1] * batch))
        captured = runner.variants["text"].graphs.captured[StepShape(batch, batch, batch, blocks)]
        if args.profile:
            profile(captured.replay)
        yield {
            "what": "atomc",
            "batch": batch,
            "graph_bytes": captured.bytes,
            "compile_s": round(compiled, 1),
            "tpot_ms": milliseconds(lambda c=captured: c.replay().argmax(-1), args.steps),
        }
    runner.logits(step([args.context], [args.context]))
    captured = runner.variants["text"].graphs.captured[prefill]
    if args.profile:
        profile(captured.replay)
    yield {
        "what": "atomc prefill",
        "batch": 1,
        "graph_bytes": captured.bytes,
        "prefill_ms": milliseconds(lambda: captured.replay().argmax(-1), args.steps),
    }
    runner.variants["text"].graphs = None
    prompt = step([args.context], [args.context])
    yield {
        "what": "atomc prefill without a graph",
        "batch": 1,
        "prefill_ms": milliseconds(lambda: runner.logits(prompt), 10),
    }
    runner.shapes = [prefill]  # to which a step is padded that comes again
    for _ in range(5):
        runner.logits(prompt)
    yield {
        "what": "atomc prefill without a graph, repeated",
        "batch": 1,
        "prefill_ms": milliseconds(lambda: runner.logits(prompt), args.steps),
    }
    runner.shapes = []
    if args.prefill:
        prompts = step([args.context] * args.prefill, [args.context] * args.prefill)
        if args.profile:
            profile(lambda: runner.logits(prompts))
        yield {
            "what": "atomc prefill without a graph",
            "batch": args.prefill,
            "prefill_ms": milliseconds(lambda: runner.logits(prompts), 5),
        }


def profile(call: Callable[[], Any]) -> None:
    """Print the kernels of one call by the time that each adds: from the end of those before it, or
    its start if that is later, to its own end. A kernel that is launched early and waits for the one
    before it adds only what is left.
    """
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    added: dict[str, list[float]] = {}
    latest, idle = min((start for _, start, _ in spans), default=0.0), 0.0
    for end, start, name in spans:
        idle += max(0.0, start - latest)
        added.setdefault(name, []).append(max(0.0, end - max(start, latest)))
        latest = max(latest, end)
    print(
        f"{sum(map(sum, added.values())):10.1f} us of kernels, {idle:.1f} between", file=sys.stderr
    )
    for name, times in sorted(added.items(), key=lambda item: -sum(item[1]))[:30]:
        mean = statistics.mean(times)
        print(f"{sum(times):10.1f} {len(times):4} x {mean:8.2f}  {name[:90]}", file=sys.stderr)


def transformers(
    args: argparse.Namespace, config: dict[str, Any], mode: str
) -> Iterator[dict[str, Any]]:
    """Stock transformers with a static cache: eager, Inductor's reduce-overhead, or our backend in
    the same mode.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    given = {name: value for name, value in config.items() if name != "architectures"}
    hf_config = AutoConfig.for_model(**given)
    # Not by default: each call of a tensor's method would pass through the default device's mode.
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    for batch in args.batches:
        torch._dynamo.reset()
        cache = StaticCache(config=hf_config, max_cache_len=args.context + 256)
        backend = {"backend": "atom"} if mode == "atom" else {}
        forward = (
            model.forward
            if mode == "eager"
            else torch.compile(model.forward, mode="reduce-overhead", **backend)
        )
        with torch.inference_mode():
            ids = torch.randint(0, 1000, (batch, args.context), device="cuda")
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, positions = (
                torch.randint(0, 1000, (batch, 1), device="cuda"),
                torch.full((batch, 1), args.context, device="cuda"),
            )

            def step(
                forward: Any = forward,
                token: Any = token,
                cache: Any = cache,
                positions: Any = positions,
            ) -> Any:
                torch.compiler.cudagraph_mark_step_begin()
                return forward(
                    input_ids=token, past_key_values=cache, use_cache=True, position_ids=positions
                )

            start = time.perf_counter()
            for _ in range(4):
                step()
            torch.cuda.synchronize()
            if args.profile:
                profile(step)
            compiled = time.perf_counter() - start
            yield {
                "what": f"transformers {mode}",
                "batch": batch,
                "tpot_ms": milliseconds(step, args.steps),
                "unwaited_ms": unwaited(step, args.steps),
                "compile_s": round(compiled, 1),
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.6b", choices=sorted(MODELS))
    parser.add_argument(
        "--batches", default="1,8,64", type=lambda text: [int(b) for b in text.split(",")]
    )
    parser.add_argument("--context", default=1024, type=int)
    parser.add_argument("--steps", default=50, type=int)
    parser.add_argument("--glue", default="auto", choices=["eager", "inductor", "auto"])
    parser.add_argument(
        "--quantization", choices=sorted(ONLINE), help="how linear layers are quantized (not)"
    )
    parser.add_argument(
        "--prefill", default=0, type=int, help="also so many sequences in one step (none)"
    )
    parser.add_argument("--beside", default="", help="also time transformers: eager,inductor,atom")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--only-beside", action="store_true", help="only transformers")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--on", nargs="*", default=[], help="passes to turn on")
    parser.add_argument("--report", action="store_true", help="print what the compiler did")
    parser.add_argument("--json", help="append the figures to this file, one a line")
    args = parser.parse_args()
    config = MODELS[args.model]
    if args.layers:
        config = {**config, "num_hidden_layers": args.layers}
    figures = []
    sources = [] if args.only_beside else [ours(args, config)]
    sources += [transformers(args, config, mode) for mode in args.beside.split(",") if mode]
    for source in sources:
        for figure in source:
            figure = {"model": args.model, "context": args.context, **figure}
            if args.layers:
                figure["layers"] = args.layers
            if args.quantization:
                figure["quantization"] = args.quantization
            if args.on:
                figure["on"] = ",".join(args.on)
            figures.append(figure)
            print(
                "  ".join(
                    f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in figure.items()
                ),
                flush=True,
            )
    if args.json:
        with open(args.json, "a") as file:
            for figure in figures:
                file.write(
                    json.dumps(
                        {
                            **figure,
                            "device": torch.cuda.get_device_name(),
                            "torch": torch.__version__,
                            "command": " ".join(["python", *sys.argv]),
                        }
                    )
                    + "\n"
                )


if __name__ == "__main__":
    main()
