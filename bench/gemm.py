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
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fusions import compile_first, mine
from kernels import ROTATED_BYTES, copy_bandwidth, microseconds, normal
from torch import Tensor

from atomc import kernels, ops
from atomc.ops.op import refusal
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


def chosen(op: str, rows: int, arguments: Arguments) -> tuple[str, Callable[..., Any]] | str:
    """Provider and function of the kernel that the compiler takes, or why there is none."""
    reasons = []
    for provider in kernels.PROVIDERS:
        for kernel in ops.REGISTRY[op].kernels:
            if kernel.provider == provider and rows in kernel.tokens:
                refused = refusal(kernel, Platform.detect("cuda"), arguments)
                if refused is None:
                    return provider, kernel.function
                reasons.append(f"{provider}: {refused.text}")
    return "; ".join(reasons) or "no kernel"


def tiles(layer: str, rows: int, k: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The kernels for few rows under every tile worth a try."""
    from atomc.kernels.triton import linear, scaled_linear, unpacking, w4a16
    from atomc.kernels.triton.tile_table import Tile

    op = LAYERS[layer].op
    if op == "linear":
        tall = 8 if rows <= 8 else 16
        sixteen_bits = (
            [
                Tile(1, n, columns, 0, warps)
                for n, columns, warps in product((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8))
                if columns <= k and 1024 <= n * columns <= 8192
            ]
            if rows == 1
            else [
                Tile(tall, n, columns, parts, warps, stages)
                for n, columns, (parts, warps), stages in product(
                    (16, 32), (64, 128, 256), ((2, 2), (4, 4), (8, 8)), (2, 3, 4, 6)
                )
                if n * columns * parts * stages <= 65536
            ]
        )
        for tile in sixteen_bits:
            yield str(tuple(tile)), partial(linear.multiply, bias=None, tile=tile)
        return
    if op.startswith("scaled"):
        blocks = op.endswith("block")

        def eight_bits(tile: Tile, **named: Any) -> Tensor:
            return scaled_linear.multiply(**{"bias": None} | named, tile=tile, blocks=blocks)

        if rows == 1:
            cut = [
                Tile(1, n, columns, 0, warps)
                for n in (2, 4, 8)
                for columns in (1024, 2048, 4096)
                for warps in (4, 8)
                if columns <= k and n * columns <= 16384
            ]
        else:
            tall = 8 if rows <= 8 else 16
            widths = (128,) if blocks else (128, 256)
            cut = [
                Tile(tall, n, columns, parts, parts, stages)
                for n in (16, 32)
                for columns in widths
                for parts in (2, 4, 8)
                for stages in (3, 5)
            ]
        for tile in cut:
            yield str(tuple(tile)), partial(eight_bits, tile)
        return

    def four(
        cut: dict[str, int],
        x: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        group: int = 32,
        x_scale: Tensor | None = None,
        global_scale: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        words = weight if weight.dtype == torch.int32 else unpacking.as_words(weight)
        if global_scale is not None:
            weight_scale, group = weight_scale.view(torch.int8), 16
        none = (None, x_scale, None)
        return w4a16.multiply(x, words, weight_scale, *none, group, out_dtype, cut, global_scale)

    if rows == 1:
        many = [
            {"BLOCK_N": n, "BLOCK_W": size // 8, "num_warps": warps}
            for n in (2, 4, 8, 16)
            for size in (2048, 4096)
            for warps in (4, 8)
        ]
    else:
        tall = 8 if rows <= 8 else 16
        many = [
            {
                "BLOCK_M": tall,
                "BLOCK_N": n,
                "BLOCK_K": columns,
                "PARTS": parts,
                "num_warps": parts,
                "num_stages": stages,
            }
            for n in (16, 32)
            for columns in (128, 256)
            for parts in (2, 4, 8)
            for stages in (2, 4)
        ]
    for shape in many:
        yield str(tuple(shape.values())), partial(four, shape)


def bf16_us(rows: int, k: int, n: int, calls: int) -> float:
    sets = [bf16(rows, n, k) for _ in range(max(2, min(32, -(-ROTATED_BYTES // (2 * n * k)))))]
    found = chosen("linear", rows, sets[0])
    times = [microseconds(lambda x, weight: F.linear(x, weight), sets, calls, 9)]
    if not isinstance(found, str):
        times.append(microseconds(found[1], sets, calls, 9))
    return min(times)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, int, int, str, Callable[..., Any]]]:
    """(scheme, K, N, rows, label, call)"""
    for k, n in args.shapes:
        for rows in args.rows:
            for name in args.schemes:
                if args.tiles:
                    for label, call in tiles(name, rows, k):
                        yield name, k, n, rows, label, call
                    continue
                found = chosen(LAYERS[name].op, rows, LAYERS[name].make(rows, n, k))
                if isinstance(found, str):
                    print(f"{name} {k}->{n}, {rows} rows: {found}", flush=True)
                else:
                    yield name, k, n, rows, *found


def main() -> None:
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
    args = parser.parse_args()
    for provider in ("triton", "cuda"):
        if reason := kernels.load(provider):
            sys.exit(reason)
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: CUDA graphs are timed")
    from triton.errors import TritonError

    if args.compile_only:
        for number, (name, k, n, rows, _, call) in enumerate(cases(args)):
            if mine(number, args.compile_only):
                with suppress(TritonError):
                    call(**LAYERS[name].make(rows, n, k))
        return
    if args.jobs:
        compile_first(args.jobs)
    bandwidth = copy_bandwidth()
    command = "python " + " ".join(sys.argv)
    about = {
        "command": command,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "copy_gbs": bandwidth / 1e9,
    }
    print(
        f"$ {command}\n{about['device']}, torch {torch.__version__}, copy "
        f"{bandwidth / 1e9:.0f} GB/s\n"
    )
    print(
        f"{'scheme':14}{'K->N':>14}{'rows':>6}  "
        f"{'kernel':28}{'us':>9}{'GB/s':>7}{'share':>7}{'TFLOP/s':>9}{'bf16 us':>9}"
        f"{'ratio':>7}"
    )
    lines: list[dict[str, Any]] = []
    beside: dict[tuple[int, ...], float] = {}
    for name, k, n, rows, label, call in cases(args):
        first = LAYERS[name].make(rows, n, k)
        num_bytes = (
            sum(t.numel() * t.element_size() for t in first.values() if isinstance(t, Tensor))
            + 2 * rows * n
        )
        sets = [first] + [
            LAYERS[name].make(rows, n, k)
            for _ in range(max(1, min(31, -(-ROTATED_BYTES // num_bytes))))
        ]
        calls = 32 if rows <= 64 else 8
        if (rows, k, n) not in beside:
            beside[rows, k, n] = bf16_us(rows, k, n, calls)
        try:
            us = microseconds(call, sets, calls, 9)
        except TritonError as too_large:
            print(f"{name} {k}->{n}, {rows} rows, {label}: {too_large}".splitlines()[0], flush=True)
            continue
        line = {
            "scheme": name,
            "k": k,
            "n": n,
            "rows": rows,
            "kernel": label,
            "us": us,
            "gbs": num_bytes / us / 1e3,
            "share": num_bytes / us * 1e6 / bandwidth,
            "tflops": 2e-6 * rows * n * k / us,
            "bf16_us": beside[rows, k, n],
            "over_bf16": beside[rows, k, n] / us,
        }
        lines.append(line)
        print(
            f"{name:14}{f'{k}->{n}':>14}{rows:6}  "
            f"{label:28}{us:9.2f}{line['gbs']:7.0f}{line['share']:7.2f}"
            f"{line['tflops']:9.1f}{line['bf16_us']:9.2f}{line['over_bf16']:7.2f}",
            flush=True,
        )
    if args.tiles:
        print()
        for case in dict.fromkeys(
            (line["scheme"], line["rows"], line["k"], line["n"]) for line in lines
        ):
            these = [
                line
                for line in lines
                if (line["scheme"], line["rows"], line["k"], line["n"]) == case
            ]
            ranked = sorted(these, key=lambda line: line["us"])[:3]
            print(
                *case,
                "  ".join(
                    f"{line['kernel']} {line['us']:.2f} ({line['share']:.2f})" for line in ranked
                ),
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(about | {"lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
