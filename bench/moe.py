"""Time mixtures of experts: the kernel that the compiler takes for so many tokens, by the format of
the weights.

    python bench/moe.py --jobs 14 --json bench/results/moe-h200.json
    python bench/moe.py --tiles --formats bf16 --models qwen3-30b --tokens 1 8 --jobs 14

Times and shares of copy bandwidth are taken as in bench/kernels.py. Each call has other tokens, with
ids of their own; its bytes are those of the experts that they hit, and the rows. Quantizing x is not
in the time. `route` is the router in front, with its product. --tiles times every tile of the
kernels for few tokens.
"""

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fusions import compile_first, mine
from gemm import Arguments, chosen, codes, scales
from kernels import copy_bandwidth, microseconds, normal
from torch import Tensor

from atomc import kernels

TOKENS = (1, 2, 4, 8, 16)
SETS = 12  # calls with different tokens; the L2 cache does not hold the experts of all
EIGHT = torch.int8


class Model(NamedTuple):
    """Experts, those of a token, the width of the model and of an expert; the op's arguments."""

    experts: int
    k: int
    hidden: int
    inner: int
    gate: Arguments
    bias: bool = False


OAI = {"activation": "swiglu_oai", "interleaved": True, "limit": 7.0}
MODELS = {
    "qwen3-30b": Model(128, 8, 2048, 768, {}),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, OAI, bias=True),
    "qwen3-next": Model(512, 10, 2048, 512, {}),
    "mixtral-8x7b": Model(8, 2, 4096, 14336, {}),
}


class Format(NamedTuple):
    """An op, its arguments that do not depend on the tokens and those that do, and the module and
    the name of its tiles.
    """

    op: str
    weights: Callable[[Model], Arguments]
    rows: Callable[[Model, int], Arguments]
    tiles: tuple[str, str] | None = None


def shapes(of: Model) -> dict[str, tuple[int, int, int]]:
    return {
        "w13": (of.experts, 2 * of.inner, of.hidden),
        "w2": (of.experts, of.hidden, of.inner),
    }


def biases(of: Model) -> Arguments:
    if not of.bias:
        return of.gate
    given = {"b13": normal(of.experts, 2 * of.inner), "b2": normal(of.experts, of.hidden)}
    return of.gate | given


def routed(of: Model, tokens: int) -> Arguments:
    order = torch.rand(tokens, of.experts, device="cuda").argsort(-1)[:, : of.k]
    weights = torch.rand(tokens, of.k, device="cuda").softmax(-1)
    return {"x": normal(tokens, of.hidden), "ids": order.to(torch.int32), "weights": weights}


def full(of: Model) -> Arguments:
    return biases(of) | {
        name: torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
        for name, shape in shapes(of).items()
    }


def transposed(of: Model) -> Arguments:
    """As transformers stores the weights of GPT-OSS."""
    made = full(of)
    for name in ("w13", "w2"):
        made[name] = made[name].transpose(1, 2).contiguous().transpose(1, 2)
    return made


def eight_bits(of: Model, dtype: torch.dtype, block: int = 0) -> Arguments:
    made = biases(of) | {"out_dtype": torch.bfloat16} | ({"block": block} if block else {})
    for name, (experts, rows, columns) in shapes(of).items():
        made[name] = codes(experts, rows, columns, dtype=torch.uint8).view(EIGHT)
        if dtype != EIGHT:  # without the codes that are no numbers
            made[name] = made[name].bitwise_and_(0x77).view(dtype)
        across = (-(-rows // block), -(-columns // block)) if block else (rows, 1)
        made[f"{name}_scale"] = scales(experts, *across)
    return made


def eight_bit_rows(of: Model, tokens: int, dtype: torch.dtype, block: int = 0) -> Arguments:
    made = routed(of, tokens)
    x = (made["x"] * 20).to(dtype)
    return made | {"x": x, "x_scale": scales(tokens, -(-of.hidden // block) if block else 1)}


def int4(of: Model, group: int = 128) -> Arguments:
    made = biases(of) | {"group": group}
    for name, (experts, rows, columns) in shapes(of).items():
        made[name] = codes(experts, rows, columns // 8, dtype=torch.int32)
        made[f"{name}_scale"] = scales(experts, rows, columns // group).bfloat16()
    return made


def mxfp4(of: Model) -> Arguments:
    made = biases(of) | {"out_dtype": torch.bfloat16}
    for name, (experts, rows, columns) in shapes(of).items():
        made[name] = codes(experts, rows, columns // 2, dtype=torch.uint8)
        made[f"{name}_scale"] = torch.randint(
            115, 127, (experts, rows, columns // 32), device="cuda", dtype=torch.uint8
        )
    return made


def router(of: Model) -> Arguments:
    return {
        "weight": normal(of.experts, of.hidden),
        "k": of.k,
        "renormalize": True,
        "logits_dtype": torch.bfloat16,
    }


E4M3 = torch.float8_e4m3fn
NUMBERS, CODES, WORDS = "experts_few", "experts_few_8_bits", "experts_few_4_bits"
FORMATS = {
    "route": Format(
        "linear_topk_route", router, lambda of, tokens: {"x": normal(tokens, of.hidden)}
    ),
    "bf16": Format("moe_experts", full, routed, (NUMBERS, "EXPERTS_FEW")),
    "bf16_transposed": Format(
        "moe_experts", transposed, routed, (NUMBERS, "EXPERTS_FEW_TRANSPOSED")
    ),
    "fp8": Format(
        "moe_experts_fp8",
        partial(eight_bits, dtype=E4M3),
        partial(eight_bit_rows, dtype=E4M3),
        (CODES, "EXPERTS_FEW_8_BITS"),
    ),
    "fp8_block": Format(
        "moe_experts_fp8",
        partial(eight_bits, dtype=E4M3, block=128),
        partial(eight_bit_rows, dtype=E4M3, block=128),
        (CODES, "EXPERTS_FEW_8_BITS"),
    ),
    "int8": Format(
        "moe_experts_int8",
        partial(eight_bits, dtype=EIGHT),
        partial(eight_bit_rows, dtype=EIGHT),
        (CODES, "EXPERTS_FEW_8_BITS"),
    ),
    "int4": Format("moe_experts_w4a16", int4, routed, (WORDS, "EXPERTS_FEW_4_BITS")),
    "mxfp4": Format("moe_experts_mxfp4", mxfp4, routed, (WORDS, "EXPERTS_FEW_4_BITS")),
}


def size(of: Arguments) -> int:
    return sum(t.numel() * t.element_size() for t in of.values() if isinstance(t, Tensor))


def moved(model: Model, weights: Arguments, sets: list[Arguments]) -> float:
    """Bytes of a call, on average: of the experts that are hit, of its rows, of the result."""
    rows = sum(size(given) for given in sets) / len(sets)
    if "ids" not in sets[0]:
        return size(weights) + rows
    hit = sum(given["ids"].unique().numel() for given in sets) / len(sets)
    return size(weights) * hit / model.experts + rows + 2 * len(sets[0]["x"]) * model.hidden


def tiles(name: str, function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The kernel under every tile worth a try."""
    from atomc.kernels.triton.tiles import ExpertsTile

    where, table = FORMATS[name].tiles or ("", "")
    module = importlib.import_module(f"atomc.kernels.triton.{where}")

    def under(tile: ExpertsTile, **arguments: Any) -> Any:
        before = getattr(module, table)
        setattr(module, table, SimpleNamespace(choose=lambda *sizes: tile))
        try:
            return function(**arguments)
        finally:
            setattr(module, table, before)

    apart = name == "bf16_transposed"
    for up in (4096, 8192, 16384):
        for down in (2048, 4096, 8192, 16384):
            for columns in (32, 64, 128) if apart else (512, 1024, 2048):
                for warps in (4, 8):
                    tile = ExpertsTile(up, down, columns, warps, apart)
                    yield ",".join(map(str, tile)), partial(under, tile)


class Timed(NamedTuple):
    """A line to measure."""

    format: str
    model: str
    tokens: int
    label: str
    call: Callable[..., Any]
    weights: Arguments
    sets: list[Arguments]


def cases(args: argparse.Namespace) -> Iterator[Timed]:
    for name in args.formats:
        for model in args.models:
            weights = FORMATS[name].weights(MODELS[model])
            for tokens in args.tokens:
                sets = [FORMATS[name].rows(MODELS[model], tokens) for _ in range(SETS)]
                found = chosen(FORMATS[name].op, tokens, weights | sets[0])
                if isinstance(found, str):
                    print(f"{name} of {model}, {tokens} tokens: {found}", flush=True)
                    continue
                every = iter([found])
                if args.tiles and FORMATS[name].tiles:
                    every = tiles(name, found[1])
                for label, call in every:
                    yield Timed(name, model, tokens, label, call, weights, sets)


def measured(case: Timed, bandwidth: float) -> dict[str, Any]:
    sets = [case.weights | given for given in case.sets]
    us = microseconds(case.call, sets, 2 * SETS, 9)
    num_bytes = moved(MODELS[case.model], case.weights, case.sets)
    return {
        "format": case.format,
        "model": case.model,
        "tokens": case.tokens,
        "kernel": case.label,
        "us": us,
        "mb": num_bytes / 1e6,
        "gbs": num_bytes / us / 1e3,
        "share": num_bytes / us * 1e6 / bandwidth,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="*", default=tuple(FORMATS), choices=tuple(FORMATS))
    parser.add_argument(
        "--models", nargs="*", default=("qwen3-30b", "gpt-oss-20b"), choices=tuple(MODELS)
    )
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="all tiles of the kernels for few tokens, not what is taken",
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
    if args.compile_only:
        for number, case in enumerate(cases(args)):
            if mine(number, args.compile_only):
                case.call(**case.weights, **case.sets[0])
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
        f"$ {about['command']}\n{about['device']}, torch {torch.__version__}, copy "
        f"{bandwidth / 1e9:.0f} GB/s\n"
    )
    print(
        f"{'format':16}{'model':14}{'tokens':>6}  {'kernel':28}{'us':>9}{'MB':>9}{'GB/s':>7}"
        f"{'share':>7}"
    )
    lines = []
    for case in cases(args):
        line = measured(case, bandwidth)
        lines.append(line)
        print(
            f"{line['format']:16}{line['model']:14}{line['tokens']:6}  {line['kernel']:28}"
            f"{line['us']:9.2f}{line['mb']:9.2f}{line['gbs']:7.0f}{line['share']:7.2f}",
            flush=True,
        )
    if args.tiles:
        print()
        for name in dict.fromkeys(
            (line["format"], line["model"], line["tokens"]) for line in lines
        ):
            these = [
                line for line in lines if (line["format"], line["model"], line["tokens"]) == name
            ]
            best = sorted(these, key=lambda line: line["us"])[:3]
            print(*name, "  ".join(f"{line['kernel']} {line['us']:.2f}" for line in best))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(about | {"lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
