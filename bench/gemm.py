"""Time linear layers in few bits, and in bf16: the kernel that the compiler takes for so many rows,
beside the faster of our kernel in bf16 and cuBLAS.

    python bench/gemm.py --jobs 14 --json bench/results/gemm-h200.json
    python bench/gemm.py --tiles --rows 1 8 --schemes fp8 --jobs 14

--tiles times every tile of the kernels for few rows. Times and shares of copy bandwidth are taken
as in bench/kernels.py; quantizing the rows is not among them.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fusions import compile_first, mine
from kernels import ROTATED_BYTES, copy_bandwidth, microseconds, normal
from torch import Tensor

from atomc import kernels, ops
from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform

# K -> N of Qwen3-8B: qkv, o, gate and up, down.
SHAPES = ((4096, 4096), (4096, 6144), (4096, 24576), (12288, 4096))
ROWS = (1, 8, 16, 64, 1024)
E4M3 = torch.float8_e4m3fn
Arguments = dict[str, Any]


class Layer(NamedTuple):
    """A scheme: its op, and arguments of it for so many rows, [N, K]."""

    op: str
    make: Callable[[int, int, int], Arguments]


def codes(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    if dtype == E4M3:
        return (normal(*shape) * 20).to(dtype)
    low = torch.iinfo(dtype).min if dtype == torch.int32 else 0
    return torch.randint(low, torch.iinfo(dtype).max, shape, device="cuda", dtype=dtype)


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, device="cuda") / 400 + 1e-4


def bf16(rows: int, n: int, k: int) -> Arguments:
    return {"x": normal(rows, k), "weight": normal(n, k)}


def fp8(rows: int, n: int, k: int, channels: bool = False) -> Arguments:
    return {
        "x": codes(rows, k),
        "weight": codes(n, k),
        "x_scale": scales(rows, 1),
        "weight_scale": scales(n, 1) if channels else scales(1),
        "out_dtype": torch.bfloat16,
    }


def fp8_static(rows: int, n: int, k: int) -> Arguments:
    return fp8(rows, n, k) | {"x_scale": scales(1)}


def fp8_block(rows: int, n: int, k: int) -> Arguments:
    return fp8(rows, n, k) | {
        "x_scale": scales(rows, k // 128),
        "weight_scale": scales(n // 128, k // 128),
    }


def int8(rows: int, n: int, k: int) -> Arguments:
    eight = torch.int8
    return {
        "x": codes(rows, k, dtype=eight),
        "weight": codes(n, k, dtype=eight),
        "x_scale": scales(rows, 1),
        "weight_scale": scales(n, 1),
        "out_dtype": torch.bfloat16,
    }


def int4(rows: int, n: int, k: int, group: int) -> Arguments:
    return {
        "x": normal(rows, k),
        "weight": codes(n, k // 8, dtype=torch.int32),
        "group": group,
        "weight_scale": scales(n, k // group).bfloat16(),
    }


def mxfp4(rows: int, n: int, k: int, coded: bool) -> Arguments:
    def e8m0(*shape: int) -> Tensor:
        return torch.randint(115, 127, shape, device="cuda", dtype=torch.uint8)

    x = codes(rows, k // 2, dtype=torch.uint8) if coded else normal(rows, k)
    return {
        "x": x,
        "weight": codes(n, k // 2, dtype=torch.uint8),
        "weight_scale": e8m0(n, k // 32),
        "x_scale": e8m0(rows, k // 32) if coded else None,
        "out_dtype": torch.bfloat16,
    }


def nvfp4(rows: int, n: int, k: int) -> Arguments:
    return {
        "x": normal(rows, k),
        "weight": codes(n, k // 2, dtype=torch.uint8),
        "weight_scale": codes(n, k // 16).float().abs().to(E4M3),
        "global_scale": scales(n, 1),
    }


LAYERS = {
    "bf16": Layer("linear", bf16),
    "fp8": Layer("scaled_linear_fp8", fp8),
    "fp8_static": Layer("scaled_linear_fp8", fp8_static),
    "fp8_per_token": Layer("scaled_linear_fp8", partial(fp8, channels=True)),
    "fp8_block": Layer("scaled_linear_fp8_block", fp8_block),
    "int8": Layer("scaled_linear_int8", int8),
    "int4": Layer("linear_w4a16", partial(int4, group=32)),
    "int4_g128": Layer("linear_w4a16", partial(int4, group=128)),
    "mxfp4": Layer("linear_mxfp4", partial(mxfp4, coded=True)),
    "mxfp4_a16": Layer("linear_mxfp4", partial(mxfp4, coded=False)),
    "nvfp4_a16": Layer("linear_nvfp4", nvfp4),
}


def chosen(op: str, rows: int, arguments: Arguments) -> Kernel | str:
    """The kernel that the compiler takes, or why there is none."""
    here, reasons = Platform.detect("cuda"), []
    for provider in kernels.PROVIDERS:
        for kernel in ops.REGISTRY[op].kernels:
            if kernel.provider == provider and rows in kernel.tokens:
                if refused := refusal(kernel, here, arguments):
                    reasons.append(f"{provider}: {refused.text}")
                elif rows in kernel.tokens_for(here, arguments):
                    return kernel
    return "; ".join(reasons) or "no kernel"


def bf16_us(rows: int, k: int, n: int, calls: int) -> float:
    sets = [bf16(rows, n, k) for _ in range(max(2, min(32, -(-ROTATED_BYTES // (2 * n * k)))))]
    found = chosen("linear", rows, sets[0])
    times = [microseconds(lambda x, weight: F.linear(x, weight), sets, calls, 9)]
    if not isinstance(found, str):
        times.append(microseconds(found.function, sets, calls, 9))
    return min(times)


class Case(NamedTuple):
    """A kernel to time, by its label: K inputs, N outputs. `kernel` prepares the weights."""

    scheme: str
    k: int
    n: int
    rows: int
    label: str
    call: Callable[..., Any]
    kernel: Kernel | None

    def given(self) -> Arguments:
        """The arguments of the op."""
        return LAYERS[self.scheme].make(self.rows, self.n, self.k)

    def arguments(self) -> Arguments:
        """Those of the kernel."""
        given = self.given()
        return given if self.kernel is None else given | self.kernel.prepared(given)

    def __str__(self) -> str:
        return f"{self.scheme} {self.k}->{self.n}, {self.rows} rows, {self.label}"


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """What the options ask to be timed. Prints why a layer has no kernel."""
    for k, n in args.shapes:
        for rows in args.rows:
            for name in args.schemes:
                found = chosen(LAYERS[name].op, rows, LAYERS[name].make(rows, n, k))
                if args.tiles:
                    from gemm_tiles import tiles

                    kernel = None if isinstance(found, str) else found
                    prepared = kernel is not None and bool(kernel.prepare)
                    for label, call in tiles(LAYERS[name].op, rows, k, prepared):
                        yield Case(name, k, n, rows, label, call, kernel)
                elif isinstance(found, str):
                    print(f"{name} {k}->{n}, {rows} rows: {found}", flush=True)
                else:
                    yield Case(name, k, n, rows, found.provider, found.function, found)


def measured(case: Case, bandwidth: float, beside: float) -> dict[str, Any]:
    """The figures of a kernel. beside: us of the layer in bf16. Raises TritonError if the kernel
    cannot be compiled.
    """
    _, k, n, rows, label, call, _ = case
    num_bytes = 2 * rows * n + sum(
        t.numel() * t.element_size() for t in case.given().values() if isinstance(t, Tensor)
    )
    others = max(1, min(31, -(-ROTATED_BYTES // num_bytes)))
    us = microseconds(call, [case.arguments() for _ in range(others + 1)], calls(rows), 9)
    return {
        "scheme": case.scheme,
        "k": k,
        "n": n,
        "rows": rows,
        "kernel": label,
        "us": us,
        "gbs": num_bytes / us / 1e3,
        "share": num_bytes / us * 1e6 / bandwidth,
        "tflops": 2e-6 * rows * n * k / us,
        "bf16_us": beside,
        "over_bf16": beside / us,
    }


def calls(rows: int) -> int:
    """How many calls one CUDA graph has."""
    return 32 if rows <= 64 else 8


def print_fastest(lines: list[dict[str, Any]]) -> None:
    """The three fastest tiles of each layer."""
    layers: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        layers.setdefault((line["scheme"], line["rows"], line["k"], line["n"]), []).append(line)
    print()
    for layer, found in layers.items():
        ranked = sorted(found, key=lambda line: line["us"])[:3]
        texts = (f"{line['kernel']} {line['us']:.2f} ({line['share']:.2f})" for line in ranked)
        print(*layer, "  ".join(texts))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", nargs="*", default=tuple(LAYERS), choices=tuple(LAYERS))
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument(
        "--shapes",
        nargs="*",
        default=SHAPES,
        help="such as 4096x6144, K x N",
        type=lambda shape: tuple(map(int, shape.split("x"))),
    )
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="all tiles of the kernels for few rows, not what is taken",
    )
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--compile-only", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the numbers to this file")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    for provider in ("triton", "cuda"):
        if reason := kernels.load(provider):
            sys.exit(reason)
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: CUDA graphs are timed")
    from triton.errors import TritonError

    if args.compile_only:
        for number, case in enumerate(cases(args)):
            if mine(number, args.compile_only):
                with suppress(TritonError):
                    case.call(**case.arguments())
        return
    if args.jobs:
        compile_first(args.jobs)
    bandwidth = copy_bandwidth()
    about = {
        "command": "python " + " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "copy_gbs": bandwidth / 1e9,
    }
    print(
        f"$ {about['command']}\n{about['device']}, torch {about['torch']}, copy "
        f"{about['copy_gbs']:.0f} GB/s\n"
    )
    print(
        f"{'scheme':14}{'K->N':>14}{'rows':>6}  "
        f"{'kernel':28}{'us':>9}{'GB/s':>7}{'share':>7}{'TFLOP/s':>9}{'bf16 us':>9}"
        f"{'ratio':>7}"
    )
    lines: list[dict[str, Any]] = []
    beside: dict[tuple[int, ...], float] = {}
    for case in cases(args):
        size = case.rows, case.k, case.n
        if size not in beside:
            beside[size] = bf16_us(*size, calls(case.rows))
        try:
            line = measured(case, bandwidth, beside[size])
        except TritonError as too_large:
            print(f"{case}: {too_large}".splitlines()[0], flush=True)
            continue
        lines.append(line)
        print(
            f"{case.scheme:14}{f'{case.k}->{case.n}':>14}{case.rows:6}  "
            f"{case.label:28}{line['us']:9.2f}{line['gbs']:7.0f}{line['share']:7.2f}"
            f"{line['tflops']:9.1f}{line['bf16_us']:9.2f}{line['over_bf16']:7.2f}",
            flush=True,
        )
    if args.tiles:
        print_fastest(lines)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(about | {"lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
