"""Time mixtures of experts on a GPU: the kernel that the compiler takes for so many tokens, and the
parts of the one for many tokens.

    python bench/experts.py --jobs 14 --json bench/results/experts-h200.json
    python bench/experts.py --parts --tokens 64 4096 --schemes bf16
    python bench/experts.py --tiles --tokens 64 --schemes bf16 --jobs 14 # every tile for many tokens

Times and shares of copy bandwidth are taken as in bench/kernels.py; quantizing x is not among them.
Tokens choose experts uniformly; bytes are those of the experts that are hit.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from fusions import compile_first, mine
from gemm import chosen, codes, scales
from kernels import copy_bandwidth, microseconds, normal
from torch import Tensor

from atomc import kernels

Arguments = dict[str, Any]
E4M3 = torch.float8_e4m3fn


class Shape(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "deepseek-v3-tp8": Shape(256, 8, 7168, 256),
}
TOKENS = (1, 8, 16, 17, 64, 256, 1024, 4096, 16384)


def routed(shape: Shape, tokens: int) -> Arguments:
    order = torch.rand(tokens, shape.experts, device="cuda").argsort(-1)[:, : shape.chosen]
    weights = torch.rand(tokens, shape.chosen, device="cuda").softmax(-1)
    return {"ids": order.int(), "weights": weights}


def rows(shape: Shape) -> tuple[tuple[str, int, int], ...]:
    return (("w13", 2 * shape.inner, shape.hidden), ("w2", shape.hidden, shape.inner))


def bf16(shape: Shape, tokens: int) -> Arguments:
    made = {name: normal(shape.experts, n, k) / k**0.5 for name, n, k in rows(shape)}
    return {"x": normal(tokens, shape.hidden), **routed(shape, tokens), **made}


def eight_bits(shape: Shape, tokens: int, dtype: torch.dtype, block: int = 0) -> Arguments:
    made = {"x": codes(tokens, shape.hidden, dtype=dtype), **routed(shape, tokens)}
    made |= {"out_dtype": torch.bfloat16} | ({"block": block} if block else {})
    made["x_scale"] = scales(tokens, shape.hidden // block if block else 1)
    for name, n, k in rows(shape):
        made[name] = codes(shape.experts, n, k, dtype=dtype)
        made[f"{name}_scale"] = (
            scales(shape.experts, -(-n // block), -(-k // block))
            if block
            else scales(shape.experts, n, 1)
        )
    return made


def int4(shape: Shape, tokens: int, group: int = 32) -> Arguments:
    made = {"x": normal(tokens, shape.hidden), **routed(shape, tokens), "group": group}
    for name, n, k in rows(shape):
        made[name] = codes(shape.experts, n, k // 8, dtype=torch.int32)
        made[f"{name}_scale"] = scales(shape.experts, n, k // group).bfloat16()
    return made


def mxfp4(shape: Shape, tokens: int) -> Arguments:
    made = {"x": normal(tokens, shape.hidden), **routed(shape, tokens)}
    made["out_dtype"] = torch.bfloat16
    for name, n, k in rows(shape):
        made[name] = codes(shape.experts, n, k // 2, dtype=torch.uint8)
        made[f"{name}_scale"] = torch.randint(
            115, 127, (shape.experts, n, k // 32), device="cuda", dtype=torch.uint8
        )
    return made


SCHEMES: dict[str, tuple[str, Callable[[Shape, int], Arguments]]] = {
    "bf16": ("moe_experts", bf16),
    "fp8": ("moe_experts_fp8", partial(eight_bits, dtype=E4M3)),
    "fp8_block": ("moe_experts_fp8", partial(eight_bits, dtype=E4M3, block=128)),
    "int8": ("moe_experts_int8", partial(eight_bits, dtype=torch.int8)),
    "int4": ("moe_experts_w4a16", int4),
    "int4_g128": ("moe_experts_w4a16", partial(int4, group=128)),
    "mxfp4_a16": ("moe_experts_mxfp4", mxfp4),
}


def table_of(scheme: str) -> Any:
    from atomc.kernels.triton import tiles

    if scheme == "bf16":
        return tiles.MOE_EXPERTS
    four = scheme.startswith(("int4", "mxfp4"))
    return tiles.MOE_EXPERTS_4_BITS if four else tiles.MOE_EXPERTS_8_BITS


def parts(scheme: str, given: Arguments, tile: Any) -> dict[str, Callable[[], Tensor]]:
    """The launches for many tokens with this tile, each by itself; without the quantizer."""
    from atomc.kernels.triton import experts_many_packed as packed
    from atomc.kernels.triton import grouped

    ids, experts = given["ids"], len(given["w13"])
    routing = grouped.sort_by_expert(ids, experts, tile.block)
    pairs = ids.numel()
    hidden, inner = given["w2"].shape[1], given["w13"].shape[1] // 2
    products = normal(pairs, hidden)
    if scheme.startswith(("int4", "mxfp4")):
        more = {"group": given.get("group", 32), "pairs": pairs, "out_dtype": torch.bfloat16}
        words = {name: packed.as_words(given[name]) for name in ("w13", "w2")}
        act = normal(pairs, inner)

        def up() -> Tensor:
            return packed.multiply(
                given["x"],
                words["w13"],
                given["w13_scale"],
                None,
                None,
                routing,
                tile.up,
                activation="silu",
                **more,
            )

        def down() -> Tensor:
            return packed.multiply(
                act, words["w2"], given["w2_scale"], None, None, routing, tile.down, **more
            )
    else:
        block, coded = given.get("block", 0), scheme != "bf16"
        more = {"square": block, "out_dtype": torch.bfloat16}
        act = codes(pairs, inner, dtype=given["x"].dtype) if coded else normal(pairs, inner)
        scale = scales(pairs, inner // block if block else 1) if coded else None

        def up() -> Tensor:
            return grouped.grouped_gate_up(
                given["x"],
                given["w13"],
                routing,
                tile.up,
                pairs=pairs,
                x_scale=given.get("x_scale"),
                w13_scale=given.get("w13_scale"),
                **more,
            )

        def down() -> Tensor:
            return grouped.grouped_down(
                act,
                given["w2"],
                routing,
                tile.down,
                act_scale=scale,
                w2_scale=given.get("w2_scale"),
                **more,
            )

    return {
        "sort": lambda: grouped.sort_by_expert(ids, experts, tile.block).order,
        "up": up,
        "down": down,
        "sum": lambda: grouped.weighted_sum(products, ids, given["weights"], experts),
    }


def every_tile() -> Iterator[Any]:
    from atomc.kernels.triton.tiles import GroupedTile

    for block in (16, 32, 64, 128):
        for weight_rows in (64, 128, 256):
            for columns in (64, 128):
                for warps in (4, 8):
                    for stages in (3, 4, 5):
                        if block * weight_rows // warps > 4096:
                            continue  # more sums than registers
                        launch = {
                            "BLOCK_N": weight_rows,
                            "BLOCK_K": columns,
                            "TALL": 8 if block == 128 else 1,
                            "num_warps": warps,
                            "num_stages": stages,
                        }
                        yield GroupedTile(block, launch, launch)


def timed(call: Callable[[], Tensor], tokens: int) -> float:
    return microseconds(call, [{}], 32 if tokens <= 64 else 4, 9)


def try_tiles(scheme: str, given: Arguments, tokens: int, share: str | None) -> None:
    """Print the ten fastest tiles of each product."""
    found: dict[str, list[tuple[float, str]]] = {"up": [], "down": []}
    for number, tile in enumerate(every_tile()):
        if not mine(number, share):
            continue
        calls = parts(scheme, given, tile)
        for part, lines in found.items():
            label = f"block {tile.block:3} {tuple(tile.up.values())}"
            try:
                if share is not None:
                    calls[part]()
                    continue
                lines.append((timed(calls[part], tokens), label))
            except Exception as error:  # a tile may need more shared memory than there is
                print(f"  {part} {label}: {type(error).__name__}", flush=True)
    for part, lines in found.items():
        for us, label in sorted(lines)[:10]:
            print(f"  {part:5}{us:9.1f} us  {label}", flush=True)


def bytes_moved(given: Arguments) -> float:
    """x, the weights of the experts that are hit, and the result."""
    weights = sum(
        t.numel() * t.element_size()
        for name, t in given.items()
        if isinstance(t, Tensor) and name.startswith(("w13", "w2"))
    )
    hit = len(given["ids"].unique()) / len(given["w13"])
    x = given["x"]
    return hit * weights + x.numel() * x.element_size() + 2 * len(x) * given["w2"].shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemes", nargs="*", default=tuple(SCHEMES), choices=tuple(SCHEMES))
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--shapes", nargs="*", default=["qwen3-30b-a3b"], choices=tuple(SHAPES))
    parser.add_argument("--parts", action="store_true", help="also each launch for many tokens")
    parser.add_argument("--tiles", action="store_true", help="all tiles for many tokens instead")
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--compile-only", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    for provider in ("triton", "torch"):
        if reason := kernels.load(provider):
            sys.exit(reason)
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: CUDA graphs are timed")
    if args.jobs:
        compile_first(args.jobs)
    bandwidth = 0.0 if args.compile_only else copy_bandwidth()
    command = "python " + " ".join(sys.argv)
    print(
        f"$ {command}\n{torch.cuda.get_device_name()}, torch {torch.__version__}, copy "
        f"{bandwidth / 1e9:.0f} GB/s\n",
        flush=True,
    )
    lines: list[dict[str, Any]] = []
    number = 0
    for shape_name in args.shapes:
        shape = SHAPES[shape_name]
        for scheme in args.schemes:
            op, make = SCHEMES[scheme]
            for tokens in args.tokens:
                given = make(shape, tokens)
                if args.tiles:
                    print(f"{shape_name} {scheme}, {tokens} tokens", flush=True)
                    try_tiles(scheme, given, tokens, args.compile_only)
                    continue
                found = chosen(op, tokens, given)
                if isinstance(found, str):
                    print(f"{shape_name} {scheme}, {tokens} tokens: {found}", flush=True)
                    continue
                provider, call = found
                if args.compile_only:
                    number += 1
                    if mine(number, args.compile_only):
                        call(**given)
                    continue
                us = timed(partial(call, **given), tokens)
                flops = 6 * tokens * shape.chosen * shape.hidden * shape.inner
                line = {
                    "shape": shape_name,
                    "scheme": scheme,
                    "tokens": tokens,
                    "kernel": f"{provider} {call.__module__.rpartition('.')[2]}",
                    "us": us,
                    "share": bytes_moved(given) / us * 1e6 / bandwidth,
                    "tflops": flops / us / 1e6,
                }
                lines.append(line)
                print(
                    f"{shape_name:16}{scheme:11}{tokens:6}  {line['kernel']:28}{us:10.1f} us  "
                    f"{line['share']:5.0%} of copy {line['tflops']:7.0f} TFLOP/s",
                    flush=True,
                )
                if args.parts:
                    pairs = tokens * shape.chosen
                    tile = table_of(scheme).choose(given["x"].device, -(-pairs // shape.experts))
                    for part, run in parts(scheme, given, tile).items():
                        print(f"    {part:6}{timed(run, tokens):10.1f} us", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"command": command, "lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
