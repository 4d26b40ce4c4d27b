"""Time of quantized linear layers on a CPU, beside the same layers in fp32 and bf16.

    python bench/cpu_quant.py --json bench/results/cpu-quant-zen4.json
    python bench/cpu_quant.py --ways int8,int8/onednn,int8/meaning --sizes 2560 --rows 1,8

A model is a chain of square layers that no cache holds. "int8/onednn" takes kernels of that
provider only, "int8/meaning" none: Inductor compiles what the ops mean. Activations are bf16, and
what quantizes them is part of the time. All ways run in this process, one step of each in turn; a
ratio is the median over --rounds of the time of fp32 (or bf16), as PyTorch runs it, by that of the
way in the same round. Times are processor time of the one thread.
"""

import argparse
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import atomc
from atomc.platform import Platform, provider_versions

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = (
    "int8",
    "int8/onednn",
    "int8/meaning",
    "int4",
    "int4/onednn",
    "int4/meaning",
    "fp8",
    "mxfp4_a16",
    "mxfp4_a16/meaning",
)
# Weights of a chain, at least: in four bits, too, they are more than the last cache of most CPUs.
ENOUGH = 80 * 2**20

Call = Callable[[], Tensor]


def chain(size: int, dtype: torch.dtype, layers: int) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
    for layer in made:
        nn.init.normal_(layer.weight, std=size**-0.5)
    return made.to(dtype).eval().requires_grad_(False)


def quantized(way: str, model: nn.Module, x: Tensor) -> tuple[Call, str]:
    """A step of the compiled model, and the kernels that it runs."""
    scheme, _, provider = way.partition("/")
    atomc.quantize(model, scheme)
    options: dict[str, Any] = {}
    if provider:
        options["providers"] = ("torch",) if provider == "meaning" else (provider, "torch")

    def forward(given: Tensor) -> Tensor:
        return model(given)  # type: ignore[no-any-return]

    # A code object of its own: of one that several ways share Dynamo would reuse the first compile.
    fresh = types.FunctionType(
        forward.__code__.replace(), globals(), "forward", None, forward.__closure__
    )
    compiled = torch.compile(fresh, backend="atom", dynamic=False, fullgraph=True, options=options)
    compiled(x)
    chosen = {f"{c.op} {c.chosen}" for c in atomc.reports()[-1].kernels if "linear" in c.op}
    return lambda: compiled(x), ", ".join(sorted(chosen))


def measure(args: argparse.Namespace, size: int, rows: int) -> list[dict[str, Any]]:
    layers = -(-ENOUGH // size**2)
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    calls: dict[str, Call] = {}
    for name, dtype in PLAIN.items():
        calls[name] = partial(chain(size, dtype, layers), x.to(dtype))
    kernels: dict[str, str] = {}
    for way in args.ways:
        calls[way], kernels[way] = quantized(way, chain(size, torch.bfloat16, layers), x)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in tqdm(
        range(args.rounds + 2), desc=f"{size} wide, {rows} rows", disable=not sys.stderr.isatty()
    ):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if number >= 2:
                times[name].append(time.thread_time() - start)
    found = []
    for name, taken in times.items():
        ratio = {
            beside: statistics.median(b / t for b, t in zip(times[beside], taken, strict=True))
            for beside in PLAIN
        }
        found.append(
            {
                "size": size,
                "rows": rows,
                "way": name,
                "ms": 1e3 * statistics.median(taken) / layers,
                "by_fp32": ratio["fp32"],
                "by_bf16": ratio["bf16"],
                "kernels": kernels.get(name, ""),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    split = lambda text: tuple(text.split(","))  # noqa: E731
    numbers = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    parser.add_argument(
        "--ways", default=WAYS, type=split, help="schemes, with /provider or /meaning"
    )
    parser.add_argument("--sizes", default=(1024, 2560, 4096), type=numbers)
    parser.add_argument("--rows", default=(1, 8, 64), type=numbers)
    parser.add_argument("--rounds", default=15, type=int)
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.cache_size_limit = 64
    here, load = Platform.detect("cpu"), os.getloadavg()[0]
    zentorch = provider_versions()["zentorch"]
    machine = (
        f"{here.name}, {', '.join(sorted(here.cpu_flags))}; 1 thread, torch {torch.__version__}, "
        f"zentorch {zentorch.version or 'not installed'}; load of the machine at the start "
        f"{load:.1f}"
    )
    command = " ".join(["python", *sys.argv])
    print(f"{command}\n{machine}\n")
    print(
        f"{'size':>5}{'rows':>5}  {'way':18}{'ms/layer':>9}{'x fp32':>8}{'x bf16':>8}  kernels",
        flush=True,
    )
    found = []
    with torch.no_grad():
        for size in args.sizes:
            for rows in args.rows:
                for row in measure(args, size, rows):
                    found.append(row)
                    text = (
                        "{size:5}{rows:5}  {way:18}{ms:9.3f}{by_fp32:8.2f}{by_bf16:8.2f}  {kernels}"
                    ).format(**row)
                    print(text.rstrip(), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"command": command, "machine": machine, "rows": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
