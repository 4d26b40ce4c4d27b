"""`atomc bench`: benchmarks of a server, or of an engine in this process."""

import argparse
import asyncio
import importlib.util
import json
import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from atomc.cli.arguments import Commands, add_number, add_switch, command
from atomc.files.file_of_flag import file_of_flag
from atomc.files.json_types import JSONLike
from atomc.runtime.config import EngineConfig
from atomc.runtime.server.flags import POSITIONAL, add_flags, named_value, values_of

if TYPE_CHECKING:
    import torch

    from atomc.runtime.bench.datasets import SampleRequest
    from atomc.runtime.bench.metrics import RequestTiming, Summary
    from atomc.runtime.engine import Engine

URL = "http://127.0.0.1:8000"
PLOTS = (".png", ".svg", ".pdf")
SAVED_TIMINGS = ("start", "ttft", "e2e", "input_tokens", "output_tokens", "error")
UNSAVED_ARGUMENTS = ("api_key", "command", "json", "plot", "quiet", "run")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench", help="Measure a server or an engine.", description="Measure a server or an engine."
    )
    kinds = parser.add_subparsers(
        dest="bench", required=True, metavar="serve | latency | throughput | startup"
    )
    _add_serve(kinds)
    _add_latency(kinds)
    _add_throughput(kinds)
    _add_startup(kinds)


# serve


def _add_serve(kinds: Commands) -> None:
    parser = command(
        kinds,
        "serve",
        _serve,
        "Send requests to a server with OpenAI's API and print throughput and latencies.",
        "  atomc bench serve --num-prompts 64 --max-concurrency 8 --plot run.png\n"
        "  atomc bench serve --base-url http://127.0.0.1:8001 --request-rate 4 --input-len 512 "
        "--output-len 128\n"
        "  atomc bench serve --dataset prompts.jsonl --json run.json --extra temperature=0.7",
    )
    parser.add_argument(
        "--base-url", default=URL, metavar="URL", help="with or without /v1 (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first in the server's list")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY, if set")
    add_number(
        parser,
        "--request-rate",
        "requests per second, as a Poisson process; inf: all at once",
        default=math.inf,
        kind=float,
    )
    add_number(parser, "--max-concurrency", "maximum number of concurrent requests", kind=_count)
    add_switch(
        parser,
        "--respect-eos",
        "let the model end its responses; otherwise requests set ignore_eos, an extension of the "
        "API by vLLM, SGLang and atomc",
    )
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        type=named_value,
        metavar="NAME=VALUE",
        help="an additional field of every request; may be given several times",
    )
    _add_prompts(parser)
    _add_output(parser, plot=True)


def _serve(arguments: argparse.Namespace) -> None:
    from atomc.runtime.bench import load
    from atomc.runtime.bench.client import Server, first_model

    samples = _samples(arguments)
    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    extra = {"temperature": 0.0, **({} if arguments.respect_eos else {"ignore_eos": True})}
    extra |= dict(arguments.extra)

    async def run() -> "tuple[str, list[RequestTiming]]":
        model = arguments.model or await first_model(arguments.base_url, key)
        return model, await load.run(
            Server(arguments.base_url, model, key, extra),
            samples,
            rate=arguments.request_rate,
            max_concurrency=arguments.max_concurrency,
            seed=arguments.prompt_seed,
            progress=not arguments.quiet,
        )

    model, requests = asyncio.run(run())
    limit = f"{arguments.max_concurrency} at a time" if arguments.max_concurrency else "all at once"
    rate = limit if math.isinf(arguments.request_rate) else f"{arguments.request_rate:g} a second"
    _print_results(arguments, requests, f"{model}: {len(requests)} requests, {rate}")


# latency


def _add_latency(kinds: Commands) -> None:
    parser = command(
        kinds,
        "latency",
        _latency,
        "Run batches one after another in this process, without a server.",
        "  atomc bench latency\n  atomc bench latency path/to/Qwen3-0.6B --batch-size 8 "
        "--input-len 1024 --output-len 128",
    )
    add_number(parser, "--batch-size", "batch size", default=1, kind=_count)
    add_number(parser, "--repeat", "measured batches", default=5, kind=_count)
    add_number(parser, "--warm-up", "warm-up batches", default=1)
    _add_lengths(parser)
    _add_output(parser, plot=True)
    _add_acceptance(parser)
    _add_engine(parser)


def _latency(arguments: argparse.Namespace) -> None:
    size = arguments.batch_size
    # No prompt repeats, so that the prefix cache has no hits.
    samples = _random_samples(arguments, size * (arguments.warm_up + arguments.repeat))
    engine = _engine(arguments)
    from atomc.runtime.bench import offline

    batches = [samples[at : at + size] for at in range(0, len(samples), size)]
    for batch in batches[: arguments.warm_up]:
        offline.run(engine, batch, 0.0, progress=False)
    engine.executor.forget_counts()
    began = time.perf_counter()
    requests: list[RequestTiming] = []
    for batch in batches[arguments.warm_up :]:
        requests += offline.run(engine, batch, began, progress=False)
    _print_results(
        arguments,
        requests,
        f"{arguments.repeat} batch{'es' * (arguments.repeat != 1)} of {size}",
        engine,
    )


# throughput


def _add_throughput(kinds: Commands) -> None:
    parser = command(
        kinds,
        "throughput",
        _throughput,
        "Run many prompts in this process, all queued at once, without a server.",
        "  atomc bench throughput\n"
        "  atomc bench throughput path/to/Qwen3-0.6B --num-prompts 256 --input-len 512 "
        "--output-len 256",
    )
    _add_prompts(parser)
    _add_output(parser, plot=True)
    _add_acceptance(parser)
    _add_engine(parser)


def _throughput(arguments: argparse.Namespace) -> None:
    samples = _samples(arguments)
    if any(sample.is_chat for sample in samples):  # checked before the engine starts
        raise ValueError(
            "a dataset with messages needs a server, which applies the chat template: atomc "
            "bench serve"
        )
    engine = _engine(arguments)
    from atomc.runtime.bench import offline

    requests = offline.run(engine, samples, time.perf_counter(), progress=not arguments.quiet)
    _print_results(arguments, requests, f"{len(samples)} prompts at once", engine)


# startup


def _add_startup(kinds: Commands) -> None:
    parser = command(
        kinds,
        "startup",
        _startup,
        "Measure the start of a process up to its first token, first cold, then warm.",
        "  atomc bench startup\n  atomc bench startup path/to/Qwen3-0.6B --server --repeat 3",
    )
    add_switch(parser, "--server", "start `atomc serve` until it is ready, instead of an engine")
    add_number(parser, "--repeat", "warm starts", default=1, kind=_count)
    add_number(
        parser, "--limit", "timeout of one start", default=900.0, kind=float, metavar="SECONDS"
    )
    _add_output(parser, plot=False)
    _add_engine(parser)


def _startup(arguments: argparse.Namespace) -> None:
    from atomc.runtime.bench.startup import format_starts, starts

    flags = _serve_flags(arguments) if arguments.server else None
    measured = list(
        starts(_config(arguments), warm=arguments.repeat, limit=arguments.limit, flags=flags)
    )
    print(format_starts(measured))
    _write(arguments, {"machine": _machine(measured[0]["device"]), "starts": measured})


# Shared


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of at least 1")
    return int(text)


def _plot(text: str) -> str:
    if Path(text).suffix not in PLOTS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file with {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{text!r}: needs matplotlib: pip install 'atomc[bench]'")
    return text


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add_number(parser, "--num-prompts", "", default=64, kind=_count)
    parser.add_argument(
        "--dataset",
        metavar="FILE",
        help="prompts from a file: .jsonl with prompt or messages (and "
        "optionally max_tokens) per line, or text with one prompt per line",
    )
    _add_lengths(parser)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("random prompts")
    add_number(group, "--input-len", "tokens per prompt", default=128, kind=_count)
    add_number(
        group,
        "--output-len",
        "new tokens per request, also for a --dataset without max_tokens",
        default=64,
        kind=_count,
    )
    add_number(group, "--prefix-len", "tokens of a common prefix, added to every prompt", default=0)
    add_number(
        group,
        "--spread",
        "relative spread of lengths; 0.5: from 0.5 to 1.5 times the length",
        default=0.0,
        kind=float,
    )
    add_number(group, "--prompt-seed", "", default=0)


def _add_output(parser: argparse.ArgumentParser, plot: bool) -> None:
    parser.add_argument(
        "--json", metavar="FILE", help="write settings, metrics and the timing of each request"
    )
    if plot:
        parser.add_argument(
            "--plot", type=_plot, metavar="FILE", help="plot the run as a .png, .svg or .pdf"
        )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _add_acceptance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--speculative-accept",
        type=float,
        metavar="X",
        help="with --speculative mtp: accept drafts so that each step yields this many tokens on "
        "average (1 to 1 + speculative tokens), whatever the model computes; the text is then NOT "
        "that of the model",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineConfig)
    parser.usage = f"{parser.prog} [MODEL] [flags]"


def _samples(arguments: argparse.Namespace) -> "list[SampleRequest]":
    from atomc.runtime.bench.datasets import requests_from_file

    count, new = arguments.num_prompts, arguments.output_len
    if arguments.dataset:
        with file_of_flag("--dataset", arguments.dataset):
            return requests_from_file(
                Path(arguments.dataset), count, new, seed=arguments.prompt_seed
            )
    return _random_samples(arguments, count)


def _random_samples(arguments: argparse.Namespace, count: int) -> "list[SampleRequest]":
    from atomc.runtime.bench.datasets import random_requests

    return random_requests(
        count,
        arguments.input_len,
        arguments.output_len,
        prefix_len=arguments.prefix_len,
        spread=arguments.spread,
        seed=arguments.prompt_seed,
    )


def _config(arguments: argparse.Namespace) -> EngineConfig:
    """Raises ValueError and OSError for wrong settings and for a folder without a model."""
    from atomc.runtime.execution.loading.hub import model_folder

    config = EngineConfig(**values_of(arguments, {}, EngineConfig))
    if config.model is not None:
        model_folder(config.model)
    return config


def _engine(arguments: argparse.Namespace) -> "Engine":
    # All prompts are queued at once, however many.
    config = replace(_config(arguments), max_queue=2**62)
    from atomc.runtime.bench.forced_acceptance import check_acceptance, force_acceptance

    accepted = arguments.speculative_accept
    if accepted is not None:
        check_acceptance(config, accepted)
    from atomc.runtime.engine import Engine  # imports torch: after the checks that need none

    engine = Engine(config, progress=not arguments.quiet)
    if accepted is not None:
        force_acceptance(engine, accepted)
    return engine


def _serve_flags(arguments: argparse.Namespace) -> list[str]:
    """The engine's flags that were given, for another command line."""

    flags: list[str] = []
    for name, value in values_of(arguments, {}, EngineConfig).items():
        flag = f"--{name.replace('_', '-')}"
        if name in POSITIONAL:
            flags.insert(0, str(value))
        elif isinstance(value, bool):
            flags.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            flags += [f"{flag}={key}={json.dumps(item)}" for key, item in value.items()]
        elif isinstance(value, tuple):
            flags += [f"{flag}={item}" for item in value]
        else:
            flags.append(f"{flag}={value}")
    return flags


def _print_results(
    arguments: argparse.Namespace,
    requests: "Sequence[RequestTiming]",
    title: str,
    engine: "Engine | None" = None,
) -> None:
    """Print the metrics, and write --json and --plot. engine: None if a server ran the requests."""
    from atomc.runtime.bench.metrics import format_summary, summarize
    from atomc.runtime.bench.plot import plot

    summary = summarize(requests)
    print(f"{title}\n{format_summary(summary)}")
    results: dict[str, JSONLike | Summary] = {"title": title, "machine": {}, "figures": summary}
    if engine is not None:
        results["machine"] = _machine(engine.program.device)
        results["device_idle_share"] = idle = engine.stats().device_idle_share
        if idle is not None:
            print(f"\nthe device waited for the host {idle:.1%} of the time")
    results["requests"] = [{name: getattr(one, name) for name in SAVED_TIMINGS} for one in requests]
    _write(arguments, results)
    if arguments.plot:
        rate = f"{summary['output_tokens_per_second']:,.0f} output tokens/s"
        plot(requests, Path(arguments.plot), f"{title}: {rate}")


def _write(arguments: argparse.Namespace, results: "Mapping[str, JSONLike | Summary]") -> None:
    if arguments.json:
        settings = {
            name: "inf" if value == math.inf else value  # JSON has no infinity
            for name, value in vars(arguments).items()
            if name not in UNSAVED_ARGUMENTS
        }
        header = {"version": import_module("atomc").__version__, "settings": settings}
        Path(arguments.json).write_text(
            json.dumps({**header, **results}, indent=1, default=str) + "\n", encoding="utf-8"
        )


def _machine(device: "torch.device | str") -> dict[str, JSONLike]:
    import torch

    gpu = torch.cuda.get_device_name() if str(device).startswith("cuda") else None
    return {
        "device": gpu or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
