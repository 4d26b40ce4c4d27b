"""Time a sampled step, from logits to tokens on the device, beside one that sorts the whole
vocabulary.

    python bench/sampler.py --json bench/results/sampler-cpu.json

us: all that the host and the device do for one step, the device waited for at the end, median of
the steps. host us: what the host needs to hand a step to a GPU. On a GPU, tokens are also compared
with those of the CPU.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atomc.runtime.requests.sample_spec import RequestCounts, SampleSpec, uniform
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.sampler import Sampler

VOCABULARY = 151936
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "top_p=0.9 of flat logits": {"top_p": 0.9},
    "top_k=50 top_p=0.9": {"top_k": 50, "top_p": 0.9},
    "min_p=0.05": {"min_p": 0.05},
    "penalties top_p=0.9": {"top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {5: 1.0, 6: -100.0}},
    "logprobs=5": {"logprobs": 5},
    "mixed": {},
}


def sample_specs(kind: str, batch: int, index: int) -> list[SampleSpec]:
    """Those of `batch` requests after a prompt of 500 tokens and `index` new ones."""
    kinds = (
        [one for name, one in KINDS.items() if name != "mixed"]
        if kind == "mixed"
        else [KINDS[kind]]
    )
    tokens = [(7919 * i) % VOCABULARY for i in range(500 + index)]
    return [
        SampleSpec(
            SamplingParams(**{"temperature": 0.8, **kinds[i % len(kinds)]}),
            i,
            index,
            500,
            counts=RequestCounts(500, list(tokens)),
        )
        for i in range(batch)
    ]


def logits_of(kind: str, batch: int, device: torch.device) -> Tensor:
    """Random ones; a few are far above the others, as a model's are, unless flat."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, VOCABULARY, generator=generator)
    if "flat" not in kind:
        logits = logits * 2 + torch.randn(batch, VOCABULARY, generator=generator).relu().pow(3)
    return logits.to(torch.bfloat16).to(device)


def sorting(logits: Tensor, draws: Sequence[SampleSpec]) -> Tensor:
    """top_k and top_p by sorting everything, and the inverse transform in double precision."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    V = logits.shape[-1]
    scaled = logits.float() / column([d.params.temperature or 1.0 for d in draws], torch.float32)
    scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
    mass = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    last = column([(d.params.top_k or V) - 1 for d in draws], torch.int64)
    limit = column([d.params.top_p for d in draws], torch.float64) * mass.gather(-1, last)
    last = torch.minimum(last, torch.searchsorted(mass, limit))
    numbers = uniform([d.seed for d in draws], [d.index for d in draws])
    target = column(numbers.tolist(), torch.float64) * mass.gather(-1, last)
    return ids.gather(-1, torch.minimum(last, torch.searchsorted(mass, target, right=True)))[:, 0]


def timed(
    step: Callable[[int], object], device: torch.device, seconds: float
) -> tuple[float, float]:
    """Microseconds of a step, and of the host alone."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for index in range(3):
        step(index)
    whole, host, index, started = [], [], 3, time.perf_counter()
    while len(whole) < 5 or (time.perf_counter() - started < seconds and len(whole) < 200):
        wait()
        before = time.perf_counter()
        step(index)
        launched = time.perf_counter()
        wait()
        whole.append(time.perf_counter() - before)
        host.append(launched - before)
        index += 1
    return statistics.median(whole) * 1e6, statistics.median(host) * 1e6


def differences(device: torch.device, batch: int) -> int:
    """Rows of all kinds whose tokens on the device are not those of the CPU."""
    found = 0
    for kind in KINDS:
        logits = logits_of(kind, batch, torch.device("cpu"))
        samplers = Sampler(torch.device("cpu"), 3 * batch), Sampler(device, 3 * batch)
        for index in range(3):
            # The same tokens before, or one difference would lead to others.
            cpu, gpu = (
                sampler(logits.to(where), sample_specs(kind, batch, index)).tokens.tolist()
                for sampler, where in zip(samplers, (torch.device("cpu"), device), strict=True)
            )
            draws = sample_specs(kind, batch, index)
            alone = [
                Sampler(device, 1)(logits[i : i + 1].to(device), [draws[i]]).tokens.item()
                for i in range(0, batch, 7)
            ]
            assert alone == gpu[::7], f"{kind}: rows know their batch"
            found += sum(a != b for a, b in zip(cpu, gpu, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if device.type == "cuda" else threads
    print("$ python", " ".join(sys.argv))
    print(f"{name}, torch {torch.__version__}, vocabulary {VOCABULARY}, bf16 logits\n", flush=True)
    results: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "vocabulary": VOCABULARY,
        "rows": [],
    }
    if device.type == "cuda":
        results["differences"] = differences(device, 32)
        print(
            f"{results['differences']} of {32 * 3 * len(KINDS)} tokens differ from those of a CPU\n"
        )
    print(f"{'':26} {'batch':>5} {'us':>10} {'host us':>9} {'sorting us':>11} {'ratio':>6}")
    for kind in KINDS:
        for batch in args.batch:
            logits, sampler = logits_of(kind, batch, device), Sampler(device, batch)
            first = sample_specs(kind, batch, 0)
            steps = [[replace(draw, index=index) for draw in first] for index in range(203)]
            us, host = timed(lambda index: sampler(logits, steps[index]), device, args.seconds)  # noqa: B023
            sorts = KINDS[kind].keys() & {"top_k", "top_p"}
            other = (
                timed(lambda index: sorting(logits, steps[index]), device, args.seconds)[0]  # noqa: B023
                if sorts
                else None
            )
            results["rows"].append(
                {"kind": kind, "batch": batch, "us": us, "host_us": host, "sorting_us": other}
            )
            more = f"{other:11.0f} {other / us:6.1f}" if other else f"{'-':>11}"
            print(f"{kind:26} {batch:5} {us:10.0f} {host:9.0f} {more}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
