"""Random mixes of requests through one engine: each request's tokens are those of running it alone.

    python bench/equality.py --dtype float64                          # no rounding counts
    python bench/equality.py --options '{"batch_invariant": true}'    # in fp32, to the bit
    python bench/equality.py --bound 1e-4                             # in fp32 as it is
    python bench/equality.py --device cuda --dtype bfloat16 --options '{"batch_invariant": true}'

The model is the demo, on a CPU if no device is given. A mix has prompts of 1 to --longest tokens
that come at random times and share beginnings; some are aborted, some draw at random, and pools are
so small that requests give way. The engines differ in layout, tokens a step, prefix cache,
speculation, order and CUDA graphs. `check()` holds after each step, and at the end nobody owns a
block.

With --bound, a first difference of greedy tokens is allowed where the lone run's two highest
log-probabilities differ by less than that; one of random tokens too, because a number may fall on
the border of two.
"""

import argparse
import json
import platform
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.requests.request import Output, Request, siblings
from atomc.runtime.requests.sampling_params import SamplingParams

LONGEST_ANSWER = 24
# Of the engine, besides --device, --dtype and --options.
ENGINES: list[dict[str, Any]] = [
    {"layout": "paged", "max_num_batched_tokens": 512, "num_blocks": 110},
    {"layout": "paged", "max_num_batched_tokens": 37, "num_blocks": 100, "speculative_tokens": 3},
    {"layout": "paged", "max_num_batched_tokens": 512, "num_blocks": 100, "enable_prefix_caching": False},
    {"layout": "paged", "max_num_batched_tokens": 256, "num_blocks": 105, "scheduling_policy": "priority"},
    {"layout": "paged", "max_num_batched_tokens": 1024, "num_blocks": 400, "speculative_tokens": 5, "max_num_seqs": 16},
    {"layout": "paged", "max_num_batched_tokens": 129, "num_blocks": 120, "enforce_eager": True},
    {"layout": "paged", "max_num_batched_tokens": 64, "num_blocks": 13, "max_model_len": 200},
    {"layout": "paged", "max_num_batched_tokens": 90, "num_blocks": 14, "max_model_len": 200, "speculative_tokens": 3,
     "scheduling_policy": "priority"},
    {"layout": "contiguous", "max_num_batched_tokens": 300, "max_num_seqs": 3},
    {"layout": "contiguous", "max_num_batched_tokens": 16, "speculative_tokens": 2},
]  # fmt: skip


class Alone:
    """Runs one request at a time, and remembers its tokens and how far the two likeliest were
    apart.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: dict[tuple[Any, ...], tuple[list[int], list[float]]] = {}

    def run(self, request: Request) -> tuple[list[int], list[float]]:
        params = request.params
        key = (tuple(request.tokens), params.temperature, params.top_p, request.seed)
        found = self.seen.get(key)
        if found is None or len(found[0]) < (params.max_tokens or 0):
            lone = SamplingParams(
                temperature=params.temperature,
                top_p=params.top_p,
                max_tokens=params.max_tokens,
                ignore_eos=True,
                logprobs=2,
            )
            self.engine.add(Request("alone", list(request.tokens), lone, seed=request.seed))
            outputs = [output for _ in until_done(self.engine) for output in self.engine.step()]
            margins = [
                one.top[0][1] - one.top[1][1] for output in outputs for one in output.logprobs or ()
            ]
            found = self.seen[key] = (
                [token for output in outputs for token in output.token_ids],
                margins,
            )
        return found


def until_done(engine: Engine) -> Iterator[None]:
    while engine.has_work:
        yield


def mix(
    seed: int, vocab_size: int, longest: int, num_requests: int
) -> list[tuple[int, Request, int | None]]:
    """(the step at which it comes, a request, the step at which it is aborted)."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        # A small alphabet, so that n-grams come again.
        return rng.choices(range(1, min(vocab_size, 40)), k=count)

    def length() -> int:
        if rng.random() < 0.3:
            return rng.randint(1, longest)
        return min(longest, int(2 ** rng.uniform(0, longest.bit_length())))

    prefixes = [tokens(length()) for _ in range(3)]
    found: list[tuple[int, Request, int | None]] = []
    for i in range(num_requests):
        prompt = (rng.choice(prefixes)[: length()] if rng.random() < 0.6 else []) + tokens(
            rng.randint(1, 9)
        )
        prompt = (prompt if rng.random() < 0.8 else tokens(length()))[:longest]
        drawn = {"temperature": 0.8, "top_p": 0.9} if rng.random() < 0.2 else {}
        params = SamplingParams(
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            ignore_eos=True,
            n=rng.choice([1, 1, 1, 1, 2]),
            **drawn,
        )
        request = Request(
            f"{seed}-{i}",
            prompt,
            params,
            seed=rng.getrandbits(32),
            priority=rng.randint(0, 2),
            salt=rng.choice([None, None, None, "other"]),
        )
        at = rng.randint(0, 3 * num_requests)
        abort = at + rng.randint(0, 20) if rng.random() < 0.15 else None
        found += [(at, one, abort) for one in siblings(request)]
    return sorted(found, key=lambda one: one[0])


def run_mix(
    engine: Engine, requests: Sequence[tuple[int, Request, int | None]]
) -> dict[str, list[int]]:
    """The new tokens of each request, and what holds after each step."""
    got: dict[str, list[int]] = {request.id: [] for _, request, _ in requests}
    waiting = list(requests)
    for now in range(100_000):
        while waiting and waiting[0][0] <= now:
            engine.add(waiting.pop(0)[1])
        for _, request, abort in requests:
            if abort == now:
                engine.abort(request.id)
        outputs: list[Output] = engine.step()
        engine.check()
        for output in outputs:
            got[output.request_id].extend(output.token_ids)
        if not waiting and not engine.has_work:
            break
    pool = engine.scheduler.pool
    assert not pool.owners and pool.num_free == pool.num_blocks, (
        "blocks are owned after the last request"
    )
    return got


def differences(
    alone: Alone,
    requests: Sequence[tuple[int, Request, int | None]],
    got: dict[str, list[int]],
    bound: float,
) -> list[str]:
    """One line for each request whose tokens are not those of running it alone."""
    found = []
    for _, request, abort in requests:
        expected, margins = alone.run(
            Request("", request.tokens[: request.num_prompt], request.params, seed=request.seed)
        )
        new = got[request.id]
        if abort is None and len(new) != request.params.max_tokens:
            found.append(f"{request.id}: {len(new)} tokens, expected {request.params.max_tokens}")
        first = next(
            (i for i, (a, b) in enumerate(zip(new, expected, strict=False)) if a != b), None
        )
        greedy = request.params.temperature == 0
        # Where rounding may decide, so it may where a random number falls on the border of two
        # tokens.
        if first is not None and (margins[first] >= bound if greedy else bound == 0):
            found.append(
                f"{request.id}: {'greedy' if greedy else 'random'} token {first} after a prompt of "
                f"{request.num_prompt} is {new[first]}, alone {expected[first]}, margin "
                f"{margins[first]:.1e}"
            )
    return found


def engine_of(
    setting: dict[str, Any], common: dict[str, Any], options: dict[str, Any], longest: int
) -> Engine:
    setting = dict(setting)
    options = {"strict": True, "glue": "eager", **options, "layout": setting.pop("layout")}
    sizes = {"max_num_seqs": 6, "max_model_len": longest + LONGEST_ANSWER, **setting}
    if "num_blocks" in sizes:  # of 16 tokens; at least what the longest request needs
        sizes["num_blocks"] = max(sizes["num_blocks"], -(-sizes["max_model_len"] // 16))
    return Engine(EngineConfig(**{**sizes, "options": options, **common}), progress=False)


def machine(device: str) -> str:
    name = (
        torch.cuda.get_device_name()
        if device != "cpu"
        else platform.processor() or platform.machine()
    )
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="number of the first mix: several processes share the work",
    )
    parser.add_argument("--requests", type=int, default=8, help="of a mix")
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", help="a checkpoint directory; left out: the demo model")
    parser.add_argument("--options", default="{}", type=json.loads)
    parser.add_argument("--bound", type=float, default=0.0)
    args = parser.parse_args()
    common = {"device": args.device, "dtype": args.dtype, "model": args.model}
    print(f"python {shlex.join(sys.argv)}\n{machine(args.device)}", flush=True)
    both = args.device == "cpu" and not args.options.get("batch_invariant")
    settings = [setting for setting in ENGINES if both or setting["layout"] == "paged"]
    lone = {
        "layout": settings[-1]["layout"],
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 2048,
    }
    alone = Alone(engine_of(lone, common, args.options, args.longest))
    wrong: list[str] = []
    started = time.perf_counter()
    tokens = requests = 0
    for number, setting in enumerate(settings):
        engine = engine_of(setting, common, args.options, args.longest)
        for seed in range(args.first + number, args.first + args.mixes, len(settings)):
            made = mix(
                seed, engine.vocab_size or 40, engine.max_len - LONGEST_ANSWER, args.requests
            )
            got = run_mix(engine, made)
            requests += len(made)
            tokens += sum(map(len, got.values()))
            wrong += differences(alone, made, got, args.bound)
        s = engine.stats()
        print(
            f"{setting}: {s.preemptions} preemptions, {s.prefix_hits} of {s.prefix_queries} "
            "prompt tokens cached, "
            f"{s.accepted} of {s.drafted} drafted tokens right, steps {dict(s.steps)}",
            flush=True,
        )
    print(
        f"{args.mixes} mixes, {requests} requests, {tokens} tokens, "
        f"{time.perf_counter() - started:.0f} s: "
        f"{len(wrong)} differ from running alone"
    )
    print("\n".join(wrong[:20]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
