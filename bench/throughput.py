"""The engine's time per token and tokens per second, on random weights, counted as others are.

    python bench/throughput.py --model 0.6b --json bench/results/throughput-h200.json
    python bench/throughput.py --model tiny --device cpu --batches 1,8 --requests 16 --new 32
    python bench/throughput.py --model 8b --tp 2    # over two GPUs; also --pp, --ep, --dp with --ep
    python bench/throughput.py --model 30b-a3b --experts --requests 0    # a mixture of experts

TPOT: a batch of prompts of --context tokens, greedy; the time of 129 new tokens each less that of
one, by 128, median of three. bare_ms is the replay of the same decode step's CUDA graph and the
argmax of its logits, by device events (one rank: a graph of several waits for the others).
Throughput: --requests prompts of --prompt tokens at once, --new tokens each, all of them generated.
host_ms is the mean time of the host for a step, waiting for the device left out. device_idle_share
is what the device waits for the host of all steps (Stats.device_idle_share).
idle_share is what it idles of a decode step at batch 64: the gaps between kernels in a profile of
--profiled steps, those within a CUDA graph left out. experts_hit (--experts) is how many experts of
a layer a decode step of the batch reads, mean of 20 steps and all layers; counting adds to the times.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from decode import milliseconds
from model_shapes import MODELS

from atomc.quantization.scheme import ONLINE
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution.worker import Worker
from atomc.runtime.requests.sampling_params import SamplingParams


def generate(engine: Engine, prompts: list[list[int]], new: int) -> float:
    """Seconds until all prompts have so many new tokens."""
    params = SamplingParams(max_tokens=new, ignore_eos=True)
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(engine.request(str(i), prompt, params))
    count = 0
    while engine.has_work:
        count += sum(len(output.token_ids) for output in engine.step())
    seconds = time.perf_counter() - started
    assert count == new * len(prompts)
    return seconds


def bare_ms(engine: Engine, batch: int, steps: int) -> float | None:
    """The step of the last batch that ran, replayed. None: on several ranks, or without graphs."""
    if (
        not isinstance(engine.executor, Worker)
        or engine.executor.runner.variants["text"].graphs is None
    ):
        return None
    shape = next(
        shape
        for shape in engine.executor.runner.variants["text"].graphs.captured
        if shape[:3] == (batch,) * 3
    )
    return milliseconds(
        lambda: engine.executor.runner.variants["text"].graphs(shape).argmax(-1), steps
    )


def idle_share(engine: Engine, prompts: list[list[int]], steps: int) -> dict[str, float]:
    """What the device idles between the first and the last kernel of so many decode steps."""
    params = SamplingParams(max_tokens=steps + 30, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(engine.request(str(i), prompt, params))
    while any(request.num_new < 10 for request in engine.scheduler.requests.values()):
        engine.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    while engine.has_work:
        engine.step()
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    end, gaps = spans[0][1], []
    for start, stop in spans:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
    total = end - spans[0][0]
    # The kernels of a graph follow each other at once; what keeps the device waiting for the host
    # takes longer.
    waits = sum(gap for gap in gaps if gap > GRAPH_GAP_US)
    return {
        "idle_share": waits / total,
        "all_gaps_share": sum(gaps) / total,
        "step_ms": total / steps / 1e3,
        "profiled_step_ms": 1e3 * seconds / steps,
    }


def experts_hit(engine: Engine, prompts: list[list[int]], steps: int) -> dict[str, float]:
    """Experts of a layer that get a token of a decode step, and how many there are; {} if the model
    has none.
    """
    params = SamplingParams(max_tokens=steps + 30, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add(engine.request(str(i), prompt, params))
    while any(request.num_new < 10 for request in engine.scheduler.requests.values()):
        engine.step()
    layers: list[Sequence[int]] = []
    for _ in range(steps):
        engine.executor.forget_counts()
        engine.step()
        layers += engine.stats().expert_load.values()
    while engine.has_work:
        engine.step()
    if not layers:
        return {}
    return {
        "experts_hit": statistics.mean(sum(map(bool, counts)) for counts in layers),
        "experts": len(layers[0]),
    }


GRAPH_GAP_US = 4.0
RANKS = {
    "tp": "GPUs that divide the weights",
    "pp": "stages that divide the layers",
    "dp": "with --ep: GPUs with requests of their own that divide the experts",
}


def figures(args: argparse.Namespace) -> Any:
    config = MODELS[args.model]
    batches = [int(batch) for batch in args.batches.split(",") if batch]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        started = time.perf_counter()
        engine = Engine(
            EngineConfig(
                model=folder,
                load_format="dummy",
                dtype=args.dtype,
                quantization=args.quantization,
                device=args.device,
                max_model_len=args.max_model_len,
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                enable_prefix_caching=False,
                tp=args.tp,
                pp=args.pp,
                dp=args.dp,
                ep=args.ep,
                expert_load=args.experts,
                options={"glue": args.glue},
            ),
            progress=False,
        )
    yield {
        "what": "start",
        "seconds": time.perf_counter() - started,
        "phases": engine.phases,
        "kv_tokens": sum(pool.num_tokens for pool in engine.scheduler.pools),
        "graphs": len(engine.program.report.cuda_graphs),
    }
    while engine.capture_graph():  # all, as after a moment without work
        pass
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(config["vocab_size"]) for _ in range(length)] for _ in range(count)]

    for batch in batches:
        given = prompts(batch, args.context)
        generate(engine, given, 4)
        one = statistics.median(generate(engine, given, 1) for _ in range(3))
        engine.host_ms = 0.0
        engine.executor.forget_counts()
        many = statistics.median(generate(engine, given, 129) for _ in range(3))
        figure = {
            "what": "tpot",
            "batch": batch,
            "context": args.context,
            "tpot_ms": 1e3 * (many - one) / 128,
            "prefill_ms": 1e3 * one,
            "host_ms": engine.host_ms,
            "device_idle_share": engine.stats().device_idle_share,
        }
        bare = bare_ms(engine, batch, 50)
        figure |= {"bare_ms": bare} if bare else {}
        yield figure | (experts_hit(engine, given, 20) if args.experts else {})
    if args.device == "cuda" and args.profiled and isinstance(engine.executor, Worker):
        yield {
            "what": "idle",
            "batch": 64,
            **idle_share(engine, prompts(64, args.context), args.profiled),
        }
    if args.requests:
        given = prompts(args.requests, args.prompt)
        engine.host_ms = 0.0
        engine.executor.forget_counts()
        seconds = min(generate(engine, given, args.new) for _ in range(2))
        stats = engine.stats()
        yield {
            "what": "throughput",
            "requests": args.requests,
            "prompt": args.prompt,
            "new": args.new,
            "tokens_per_s": args.requests * args.new / seconds,
            "seconds": seconds,
            "host_ms": stats.host_ms,
            "device_idle_share": stats.device_idle_share,
            "steps": dict(stats.steps),
            "padding": stats.graph_padding / max(stats.graph_rows + stats.graph_padding, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.6b", choices=sorted(MODELS))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--context", default=1024, type=int)
    parser.add_argument("--requests", default=256, type=int)
    parser.add_argument("--prompt", default=512, type=int)
    parser.add_argument("--new", default=256, type=int)
    parser.add_argument("--profiled", default=50, type=int)
    parser.add_argument("--max-model-len", default=4096, type=int)
    parser.add_argument("--max-num-seqs", default=256, type=int)
    parser.add_argument("--max-num-batched-tokens", default=2048, type=int)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--glue", default="auto", choices=["eager", "inductor", "auto"])
    parser.add_argument(
        "--quantization", choices=sorted(ONLINE), help="how linear layers are quantized (not)"
    )
    for name, text in RANKS.items():
        parser.add_argument(f"--{name}", default=1, type=int, help=text)
    parser.add_argument("--ep", action="store_true", help="each rank has some of the experts")
    parser.add_argument("--experts", action="store_true", help="count the experts of a step")
    parser.add_argument("--json", help="append the figures to this file, one a line")
    args = parser.parse_args()
    for figure in figures(args):
        figure = {"model": args.model, **figure}
        if args.quantization:
            figure["quantization"] = args.quantization
        figure |= {name: getattr(args, name) for name in RANKS if getattr(args, name) > 1}
        if args.ep:
            figure["ep"] = True
        print(
            "  ".join(
                f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
                for name, value in figure.items()
            ),
            flush=True,
        )
        if args.json:
            where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
            with open(args.json, "a") as file:
                file.write(
                    json.dumps(
                        {
                            **figure,
                            "device": where,
                            "torch": torch.__version__,
                            "command": " ".join(["python", *sys.argv]),
                        }
                    )
                    + "\n"
                )


if __name__ == "__main__":
    main()
