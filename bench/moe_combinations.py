"""The modular kernel of mixtures of experts (docs/moe.md): which parts can be combined, and one
combination checked against the reference of its op and timed.

    python bench/moe_combinations.py                     # the table of all pairs, with reasons
    python bench/moe_combinations.py --prepare no_ep --experts grouped --tokens 256
    python bench/moe_combinations.py --prepare no_ep --experts grouped --profile trace.json

Under torchrun (--prepare all_to_all) each rank has --tokens tokens and an equal part of the experts;
otherwise one process has all. error: the root mean square of the difference, relative to that of the reference. A time is
the median of --repeat calls, from the start to the end of one. The exit code is 1 if the pair is
illegal or its results are wrong.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from moe_parts import EXPERTS, PREPARE, REFUSED, names, why_not
from torch import Tensor, distributed

from atomc.kernels.moe import (
    SCHEMES,
    ExpertsConfig,
    ExpertWeights,
    Fp8PerBlock,
    ModularExperts,
    PrepareFinalize,
)
from atomc.kernels.moe.combinations.reference import experts_reference
from atomc.platform import Platform

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the error. A part that keeps fp32 where the reference rounds quantizes other numbers.
TOLERANCE = {("none", "float32"): 1e-5, ("none", "bfloat16"): 1e-2, ("none", "float16"): 2e-3}
QUANTIZED_TOLERANCE = 4e-2


class Layer(NamedTuple):
    x: Tensor
    ids: Tensor
    weights: Tensor
    of_experts: ExpertWeights


def table(device: torch.device) -> str:
    """A line per pair of parts that are here: the schemes for which it is legal, or why there is
    none; then a line per part that has no pairs.
    """
    width = max(map(len, (*names("prepare"), *names("experts")))) + 2
    lines, legal = [f"{'prepare':{width}}{'experts':{width}}", ""], 0
    for prepare in PREPARE:
        for experts in EXPERTS:
            reasons = {scheme: why_not(prepare, experts, scheme) for scheme in SCHEMES}
            able = [scheme for scheme, reason in reasons.items() if reason is None]
            legal += bool(able)
            found = ["legal for " + ", ".join(able)] if able else []
            found += [reason for reason in reasons.values() if reason][:1]
            if able and (absent := EXPERTS[experts].part.missing(device)):
                found.append(f"not on {device.type}: {absent}")
            text = "; ".join(found) if able else f"illegal: {found[0]}"
            lines.append(f"{prepare:{width}}{experts:{width}}{text}")
    lines.append("")
    for refused in REFUSED.values():
        first, second = (refused.name, "any")[:: 1 if refused.kind == "prepare" else -1]
        lines.append(f"{first:{width}}{second:{width}}illegal: {refused.reason}")
    pairs = len(names("prepare")) * len(names("experts"))
    return "\n".join([*lines, "", f"{legal} of {pairs} pairs are legal"])


def layer(args: argparse.Namespace, device: torch.device, rank: int) -> Layer:
    """The tokens of a rank, and all experts, which are the same on all ranks."""
    dtype, hidden, inner = DTYPES[args.dtype], args.hidden, args.inner

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype)

    generator = torch.Generator().manual_seed(0)
    w13 = normal(args.experts_count, 2 * inner, hidden) / hidden**0.5
    w2 = normal(args.experts_count, hidden, inner) / inner**0.5
    generator.manual_seed(rank + 1)
    x = normal(args.tokens, hidden)
    chosen = torch.rand(args.tokens, args.experts_count, generator=generator).argsort(-1)
    ids = chosen[:, : args.choices].int().to(device)
    weights = normal(args.tokens, args.choices).float().softmax(-1)
    (w13, w13_scale), (w2, w2_scale) = (quantized(w, args.scheme) for w in (w13, w2))
    return Layer(x, ids, weights, ExpertWeights(w13, w2, w13_scale, w2_scale))


def quantized(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of weights [E, N, K] as moe_experts and its forms take them."""
    chosen = SCHEMES[scheme]
    if not isinstance(chosen, Fp8PerBlock):
        return chosen.quantize(weight)
    b, (experts, rows, columns) = chosen.block, weight.shape
    largest = torch.finfo(chosen.dtype).max
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % b, 0, -rows % b))
    squares = padded.view(experts, -(-rows // b), b, -(-columns // b), b)
    scale = squares.abs().amax((2, 4), keepdim=True).clamp(min=1e-10) / largest
    codes = (squares / scale).to(chosen.dtype).view_as(padded)[:, :rows, :columns]
    return codes.contiguous(), scale.squeeze(4).squeeze(2)


def rows(of_experts: ExpertWeights, held: Tensor) -> ExpertWeights:
    """The weights of some experts."""
    stored = vars(of_experts).items()
    return ExpertWeights(**{name: None if w is None else w[held] for name, w in stored})


def milliseconds(call: Callable[[], Tensor], repeat: int, device: torch.device) -> float:
    """The median of several calls, after one that is not timed."""

    def once() -> float:
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        return 1e3 * (time.perf_counter() - start)

    once()
    return statistics.median(once() for _ in range(repeat))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile(moe: ModularExperts, call: Callable[[], Tensor], file: Path) -> None:
    """Writes a trace of one call for chrome://tracing or Perfetto, with the steps of the parts."""
    prepare, experts = moe.prepare_finalize, moe.experts
    for part, step in (
        (prepare, "prepare_no_receive"),
        (experts, "apply"),
        (prepare, "finalize"),
    ):
        setattr(part, step, labelled(f"{part.name}.{step}", getattr(part, step)))
    with torch.profiler.profile() as profiler:  # of all devices that are here
        call()
    profiler.export_chrome_trace(str(file))


def labelled(label: str, function: Callable[..., object]) -> Callable[..., object]:
    def run(*given: object) -> object:
        with torch.profiler.record_function(label):
            return function(*given)

    return run


def start(prepare: str, device: torch.device) -> tuple[int, int]:
    """Rank and number of ranks: of torchrun, or a group of this process alone if it needs one."""
    if "RANK" in os.environ:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return distributed.get_rank(), distributed.get_world_size()
    if not PREPARE[prepare].alone and not distributed.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    return 0, 1


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    rank, ranks = start(args.prepare, device)
    if args.experts_count % ranks:
        sys.exit(f"{args.experts_count} experts cannot be divided among {ranks} ranks")
    if PREPARE[args.prepare].alone and ranks > 1:
        sys.exit(f"{args.prepare} is for one rank, and torchrun started {ranks}")
    given = layer(args, device, rank)
    held = torch.arange(rank, args.experts_count, ranks, device=device)
    expert_map = torch.full((args.experts_count,), -1, dtype=torch.int32, device=device)
    expert_map[held] = torch.arange(len(held), dtype=torch.int32, device=device)
    part: PrepareFinalize = PREPARE[args.prepare].make(expert_map, args.tokens)
    config = ExpertsConfig(SCHEMES[args.scheme], args.activation)
    moe = ModularExperts(part, EXPERTS[args.experts].part(), config, chunk_rows=args.chunk_rows)
    of_rank = moe.prepare_weights(rows(given.of_experts, held))

    def call() -> Tensor:
        return moe(given.x, given.ids, given.weights, of_rank)

    codes, scale = config.scheme.quantize(given.x)
    expected = experts_reference(
        codes, scale, given.ids, given.weights, given.of_experts, config, given.x.dtype
    ).float()
    size = expected.square().mean().sqrt()
    error = float((call().float() - expected).square().mean().sqrt() / size)
    ms = milliseconds(call, args.repeat, device)
    if args.profile:
        profile(moe, call, args.profile if ranks == 1 else Path(f"{args.profile}.{rank}"))
    products = 6 * args.tokens * args.choices * args.hidden * args.inner
    tolerance = TOLERANCE.get((args.scheme, args.dtype), QUANTIZED_TOLERANCE)
    return {
        "rank": rank,
        "ranks": ranks,
        "error": error,
        "tolerance": tolerance,
        "right": error <= tolerance,
        "ms": ms,
        "tflops": products / ms / 1e9,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--prepare", metavar="PART", help=f"one of {', '.join(PREPARE)}")
    made.add_argument("--experts", metavar="PART", help=f"one of {', '.join(EXPERTS)}")
    made.add_argument(
        "--scheme", default="none", choices=[*SCHEMES], help="of weights and activations"
    )
    made.add_argument("--tokens", type=int, default=64, help="tokens of each rank (64)")
    made.add_argument("--experts-count", type=int, default=16, help="experts of all ranks (16)")
    made.add_argument("--choices", type=int, default=4, help="experts of each token (4)")
    made.add_argument("--hidden", type=int, default=512, help="width of the model (512)")
    made.add_argument("--inner", type=int, default=256, help="width of an expert (256)")
    made.add_argument("--activation", default="silu", help="silu, gelu, gelu_tanh or swiglu_oai")
    made.add_argument("--chunk-rows", type=int, help="the most rows that experts process at once")
    made.add_argument("--dtype", default="bfloat16", choices=[*DTYPES], help="of x (bfloat16)")
    made.add_argument("--device", help="cpu, cuda (cuda where there is one)")
    made.add_argument("--repeat", type=int, default=20, help="timed calls (20)")
    made.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a torch trace of one call"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    return made


def main(arguments: list[str] | None = None) -> None:
    given = parser()
    args = given.parse_args(arguments)
    local = f":{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else ""
    name = args.device or (f"cuda{local}" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if args.prepare is None and args.experts is None:
        print(table(device))
        return
    if args.prepare is None or args.experts is None:
        given.error("--prepare and --experts name a pair: give both, or neither for the table")
    try:
        if reason := why_not(args.prepare, args.experts, args.scheme):
            sys.exit(f"illegal: {reason}")
        found = measure(args, device)
    except ValueError as error:
        sys.exit(str(error))
    command = " ".join(["python bench/moe_combinations.py", *(arguments or sys.argv[1:])])
    about = {"command": command, "device": Platform.detect(device.type).name}
    about["torch"] = torch.__version__
    if found["rank"] == 0:
        print(f"$ {command}\n{about['device']}, torch {torch.__version__}\n")
    print(
        f"rank {found['rank']} of {found['ranks']}: {'right' if found['right'] else 'WRONG'}, error "
        f"{found['error']:.2g} (at most {found['tolerance']:.0e}), {found['ms']:.3f} ms, "
        f"{found['tflops']:.2f} TFLOP/s",
        flush=True,
    )
    if args.profile:
        print(f"trace: {args.profile}")
    if args.json and found["rank"] == 0:
        args.json.write_text(json.dumps(about | found, indent=1) + "\n")
    if distributed.is_initialized() and "RANK" in os.environ:
        distributed.destroy_process_group()
    if not found["right"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
