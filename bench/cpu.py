"""Time of one decode step on a CPU: a stock transformers model eagerly, by Inductor and by atomc,
and atomc's runtime.

    python bench/cpu.py --json bench/results/cpu-zen4.json | tee bench/results/cpu-zen4.txt
    python bench/cpu.py --ways inductor,atom --batches 1 --dtypes float32 --profile
    python bench/cpu.py --tiny --ways inductor,atom --batches 1 --layers 12 --context 256 --rounds 400

The model is a Qwen3 of --layers layers, 1024 wide, or 64 wide with --tiny, where a step is what its
calls cost, with random weights that all ways share; each sequence has --context tokens in a static cache, the runtime's in its own. All ways run in this
process, one step of each in turn; a speed-up is the median over --rounds of Inductor's time by that
of the way in the same round. Times are processor time of the one thread, or with more --threads
wall-clock time. SQNR is that of the logits against a float64 run of the same model.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

import atomc
from atomc.loading.loader import load
from atomc.ops import GroupStep, Step
from atomc.ops.state import block_size_of
from atomc.platform import Platform
from atomc.program import compile_model

WAYS = ("eager", "inductor", "atom", "runtime")
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
TINY = {
    **SHAPE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}

Call = Callable[[], Tensor]


def stock_model(args: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=args.layers, **shape_of(args))
    with torch.inference_mode(False):  # as a user loads one: those of inference are never packed
        model: nn.Module = Qwen3ForCausalLM._from_config(config, dtype=dtype)
        return model.eval().requires_grad_(False)


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    return TINY if args.tiny else SHAPE


def decode_of(model: nn.Module, ids: Tensor, compiler: Callable[[Any], Any]) -> Call:
    """A step that always decodes the last of the ids [B, context], the others being in a static
    cache.
    """
    context = ids.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=context)
    model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    positions = torch.full((len(ids), 1), context - 1)

    def forward(token: Tensor, positions: Tensor, cache: StaticCache) -> Tensor:
        logits: Tensor = model(
            input_ids=token, past_key_values=cache, use_cache=True, position_ids=positions
        ).logits
        return logits

    # A code object of its own: of one that several ways share Dynamo would reuse the first compile.
    run = compiler(
        types.FunctionType(
            forward.__code__.replace(), globals(), "forward", None, forward.__closure__
        )
    )
    token = ids[:, -1:].clone()

    def step() -> Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context - 1)  # a step adds one
        logits: Tensor = run(token, positions, cache)
        return logits[:, 0]

    return step


def runtime_of(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> Call:
    """The same step by atomc's runtime: weights as checkpoint, the cache filled by a prefill."""
    count, context = ids.shape
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        program = compile_model(
            load(folder, dtype=model.dtype, mmap=False, progress=False), options
        )
    block_size = block_size_of(program.specs) or context
    blocks = -(-context // block_size)
    program.bind([spec.allocate(count * blocks, block_size, "cpu") for spec in program.specs])
    program(step_of(ids[:, :-1], 0, blocks, block_size))
    last = step_of(ids[:, -1:], context - 1, blocks, block_size)
    return lambda: program(last)


def step_of(ids: Tensor, start: int, blocks: int, block_size: int) -> Step:
    """A step of all sequences, each in so many blocks of its own, that adds the ids [B, T] after
    `start` tokens.
    """
    count, new = ids.shape
    positions = torch.arange(start, start + new).repeat(count)
    slots = torch.arange(count).repeat_interleave(new) * blocks * block_size + positions
    tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
    starts = torch.arange(0, count * new + 1, new, dtype=torch.int32)
    group = GroupStep(slots, tables)
    return Step(
        ids.flatten().contiguous(),
        positions,
        starts,
        torch.full((count,), start + new, dtype=torch.int32),
        (starts[1:] - 1).long(),
        (group,),
        torch.arange(count),
    )


def ways_of(args: argparse.Namespace, model: nn.Module, ids: Tensor) -> Iterator[tuple[str, Call]]:
    compilers: dict[str, Callable[[Any], Any]] = {
        "eager": lambda forward: forward,
        "inductor": lambda forward: torch.compile(forward, dynamic=False, fullgraph=True),
        "atom": lambda forward: torch.compile(
            forward, dynamic=False, fullgraph=True, backend="atom", options=args.options
        ),
    }
    for way in tqdm(
        args.ways,
        desc=f"compiling {model.dtype}, batch {len(ids)}",
        disable=not sys.stderr.isatty(),
    ):
        yield (
            way,
            runtime_of(model, ids, args.options)
            if way == "runtime"
            else decode_of(model, ids, compilers[way]),
        )


def timed(call: Call, clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def sqnr(found: Tensor, truth: Tensor) -> float:
    """Decibels of signal over error."""
    truth = truth.double()
    return 10 * float((truth.square().sum() / (found.double() - truth).square().sum()).log10())


def measure(args: argparse.Namespace, dtype: torch.dtype, batch: int) -> Iterator[dict[str, Any]]:
    """One row per way: milliseconds, speed-up over Inductor, first call, error."""
    vocabulary, generator = shape_of(args)["vocab_size"], torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (batch, args.context), generator=generator)
    model = stock_model(args, dtype)
    truth = decode_of(stock_model(args, dtype).double(), ids, lambda forward: forward)()
    calls, firsts, errors = {}, {}, {}
    start = time.perf_counter()
    for way, call in ways_of(args, model, ids):
        errors[way] = sqnr(call(), truth)
        firsts[way], start = time.perf_counter() - start, time.perf_counter()
        calls[way] = call
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {way: [] for way in calls}
    for round_ in tqdm(range(args.rounds + 4), desc="timing", disable=not sys.stderr.isatty()):
        for way, call in calls.items():
            taken = timed(call, clock)
            if round_ >= 4:  # atomc records the second and the third call
                times[way].append(taken)
    if args.profile:
        for way, call in calls.items():
            profile(way, call)
    for way, taken in times.items():
        beside = times.get("inductor", taken)
        yield {
            "dtype": str(dtype).removeprefix("torch."),
            "batch": batch,
            "way": way,
            "ms": 1e3 * statistics.median(taken),
            "speedup": statistics.median(b / t for b, t in zip(beside, taken, strict=True)),
            "first_call_s": firsts[way],
            "sqnr_db": errors[way],
        }


def profile(way: str, call: Call) -> None:
    """Print what ten steps spend their time in."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(10):
            call()
    table = found.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=50
    )
    print(f"{way}, ten steps\n{table}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    split = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--ways", default=WAYS, type=split, help="of " + ",".join(WAYS))
    parser.add_argument("--dtypes", default=("float32", "bfloat16"), type=split)
    parser.add_argument(
        "--batches", default=(1, 8), type=lambda text: tuple(map(int, text.split(",")))
    )
    parser.add_argument(
        "--context", default=512, type=int, help="tokens of each sequence, the new one among them"
    )
    parser.add_argument("--layers", default=8, type=int)
    parser.add_argument("--tiny", action="store_true", help="64 wide instead of 1024")
    parser.add_argument("--rounds", default=40, type=int)
    parser.add_argument("--threads", default=1, type=int)
    parser.add_argument(
        "--options", default={}, type=json.loads, help='of atomc, as JSON: {"providers": ["torch"]}'
    )
    parser.add_argument(
        "--profile", action="store_true", help="also print what the steps spend their time in"
    )
    parser.add_argument("--report", action="store_true", help="also print what the compiler did")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()
    unknown = [way for way in args.ways if way not in WAYS]
    if unknown:
        parser.error(f"no way {unknown[0]!r}: expected some of {','.join(WAYS)}")
    torch.set_num_threads(args.threads)
    torch._dynamo.config.cache_size_limit = 64
    here = Platform.detect("cpu")
    machine = (
        f"{here.name}, {', '.join(sorted(here.cpu_flags))}; {args.threads} threads, "
        f"torch {torch.__version__}"
    )
    command = " ".join(["python", *sys.argv])
    print(f"{command}\n{machine}\n")
    print(
        f"{'dtype':10}{'batch':>5}  "
        f"{'way':10}{'ms':>8}{'speed-up':>10}{'first call s':>14}{'SQNR dB':>9}",
        flush=True,
    )
    rows = []
    for dtype in args.dtypes:
        for batch in args.batches:
            torch._dynamo.reset()
            with torch.inference_mode():
                for row in measure(args, getattr(torch, dtype), batch):
                    rows.append(row)
                    print(
                        "{dtype:10}{batch:5}  {way:10}{ms:8.3f}{speedup:10.2f}{first_call_s:14.1f}{sqnr_db:9.0f}".format(
                            **row
                        ),
                        flush=True,
                    )
            if args.report:
                for report in atomc.reports()[-2:]:
                    print(report.to_text(), file=sys.stderr)
    if args.json:
        args.json.write_text(
            json.dumps({"command": command, "machine": machine, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
