"""Time mixtures of experts: the kernel that the compiler takes for so many tokens, by the format of
the weights, and the router.

    python bench/moe.py --jobs 14 --json bench/results/moe-h200.json
    python bench/moe.py --parts --formats bf16 --models qwen3-30b --tokens 64 4096
    python bench/moe.py --tiles --formats bf16 --models qwen3-30b --tokens 1 8 64 --jobs 14

Times and shares of copy bandwidth are taken as in bench/kernels.py. Tokens choose experts
uniformly, and each call has other tokens; its bytes are those of the experts that they hit, of the
tokens and of the result. Quantizing x is not in the time. `route` is the router in front, with its
product, as one op; with --parts also the linear layer and the choice, each the kernel that is taken.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from fusions import compile_first, mine
from gemm import Arguments, chosen, codes, scales
from kernels import copy_bandwidth, microseconds, normal
from torch import Tensor

from atomc import kernels
from atomc.ops.op import Kernel

if TYPE_CHECKING:
    from atomc.kernels.triton.launch.tile_table import ExpertsFewTile, FragmentTile, Launch

TOKENS = (1, 2, 4, 8, 16, 17, 64, 256, 1024, 4096, 16384)
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
PARTS = ("sort", "up", "down", "sum")


class Model(NamedTuple):
    """Experts, those of a token, the width of the model and of an expert; the op's arguments."""

    experts: int
    k: int
    hidden: int
    inner: int
    gate: Arguments
    bias: bool = False


SILU = {"activation": "silu", "interleaved": False, "alpha": 1.702, "limit": None}
OAI = {"activation": "swiglu_oai", "interleaved": True, "alpha": 1.702, "limit": 7.0}
MODELS = {
    "qwen3-30b": Model(128, 8, 2048, 768, SILU),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, OAI, bias=True),
    "deepseek-v2-lite": Model(64, 6, 2048, 1408, SILU),
    "qwen3-next": Model(512, 10, 2048, 512, SILU),
    "mixtral-8x7b": Model(8, 2, 4096, 14336, SILU),
    "deepseek-v3": Model(256, 8, 7168, 2048, SILU),
    "deepseek-v3-tp8": Model(256, 8, 7168, 256, SILU),
}


class Format(NamedTuple):
    """How weights are stored: an op, and its arguments that do not depend on the tokens.

    tiles   the name of the table of tiles for many tokens ("": the router has none)
    dtype   of x
    block   columns of x that share a scale, 0 for the whole row
    group   columns of a weight that share a scale, of which a row has a whole number
    """

    op: str
    weights: Callable[[Model], Arguments]
    tiles: str = ""
    dtype: torch.dtype = torch.bfloat16
    block: int = 0
    group: int = 1


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


def full(of: Model) -> Arguments:
    return biases(of) | {name: normal(*shape) for name, shape in shapes(of).items()}


def transposed(of: Model) -> Arguments:
    """As transformers stores the weights of GPT-OSS."""
    made = full(of)
    for name in ("w13", "w2"):
        made[name] = made[name].transpose(1, 2).contiguous().transpose(1, 2)
    return made


def eight_bits(of: Model, dtype: torch.dtype, block: int = 0) -> Arguments:
    made = biases(of) | {"out_dtype": torch.bfloat16} | ({"block": block} if block else {})
    for name, (experts, rows, columns) in shapes(of).items():
        made[name] = codes(experts, rows, columns, dtype=torch.uint8).view(INT8)
        if dtype != INT8:  # without the codes that are no numbers
            made[name] = made[name].bitwise_and_(0x77).view(dtype)
        across = (-(-rows // block), -(-columns // block)) if block else (rows, 1)
        made[f"{name}_scale"] = scales(experts, *across)
    return made


def int4(of: Model, group: int) -> Arguments:
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


FP8_WEIGHTS = partial(eight_bits, dtype=E4M3)
NUMBERS, CODES, WORDS = "MOE_EXPERTS", "MOE_EXPERTS_8_BITS", "EXPERTS_FRAGMENTS"
FORMATS = {
    "route": Format("linear_topk_route", router),
    "bf16": Format("moe_experts", full, NUMBERS),
    "bf16_transposed": Format("moe_experts", transposed, NUMBERS),
    "fp8": Format("moe_experts_fp8", FP8_WEIGHTS, CODES, E4M3),
    "fp8_block": Format("moe_experts_fp8", partial(FP8_WEIGHTS, block=128), CODES, E4M3, 128),
    "int8": Format("moe_experts_int8", partial(eight_bits, dtype=INT8), CODES, INT8),
    "int4": Format("moe_experts_w4a16", partial(int4, group=32), WORDS, group=32),
    "int4_g128": Format("moe_experts_w4a16", partial(int4, group=128), WORDS, group=128),
    "mxfp4": Format("moe_experts_mxfp4", mxfp4, WORDS, group=32),
}


def rows(of: Format, model: Model, tokens: int) -> Arguments:
    """The arguments that depend on the tokens."""
    x = normal(tokens, model.hidden)
    if not of.tiles:
        return {"x": x}
    order = torch.rand(tokens, model.experts, device="cuda").argsort(-1)[:, : model.k]
    weights = torch.rand(tokens, model.k, device="cuda").softmax(-1)
    made = {"x": x, "ids": order.to(torch.int32), "weights": weights}
    if of.dtype == torch.bfloat16:
        return made
    return made | quantized(of, x)


def quantized(of: Format, x: Tensor, name: str = "x") -> Arguments:
    """x as codes, with some scales."""
    count, columns = x.shape
    scale = scales(count, -(-columns // of.block) if of.block else 1)
    return {name: (x * 20).to(of.dtype), f"{name}_scale": scale}


def few_tiles() -> "Iterator[ExpertsFewTile]":
    """The tiles worth a try of the kernels for few tokens."""
    from atomc.kernels.triton.launch.tile_table import ExpertsFewTile

    for up in (4096, 8192, 16384):
        for down in (2048, 4096, 8192, 16384):
            for columns in (512, 1024, 2048):
                for warps in (4, 8):
                    yield ExpertsFewTile(up, down, columns, warps)


def worth_a_try(block: int, per_expert: int) -> bool:
    """Whether a block of so many pairs is neither one of many nor mostly empty."""
    return per_expert / 2 <= block <= max(16, 4 * per_expert) or block == 128 < per_expert


def grouped_tiles(per_expert: int) -> "Iterator[Launch]":
    """The tiles worth a try of the kernels for many tokens."""
    for block in (16, 32, 64, 128):
        if not worth_a_try(block, per_expert):
            continue
        for weight_rows in (64, 128, 256):
            for columns in (64, 128):
                for warps in (4, 8):
                    for stages in (3, 4, 5):
                        if block * weight_rows // warps > 4096:
                            continue  # more sums than registers
                        yield {
                            "BLOCK_M": block,
                            "BLOCK_N": weight_rows,
                            "BLOCK_K": columns,
                            "TALL": 8 if block == 128 else 1,
                            "num_warps": warps,
                            "num_stages": stages,
                        }


# Rows of the weight that a program takes, and its warps.
FRAGMENT_ROWS = ((16, 1), (32, 1), (32, 2), (64, 2), (128, 2), (64, 4), (128, 4), (128, 8))


def fragment_tiles(per_expert: int) -> "Iterator[FragmentTile]":
    """The tiles worth a try of the kernels for 4-bit weights."""
    from atomc.kernels.triton.launch.tile_table import FragmentTile

    for block in (8, 16, 32, 64, 128, 256):
        if not worth_a_try(block, per_expert):
            continue
        for weight_rows, warps in FRAGMENT_ROWS:
            for stages in (3, 4, 5):
                if warps in ((4, 8) if block >= 64 else (1, 2, 4)):
                    tall = 8 if block >= 64 else 1
                    yield FragmentTile(block, weight_rows, warps, stages, tall)


def prepared(kernel: Kernel, sets: list[Arguments]) -> list[Arguments]:
    """Arguments with the weights as this kernel reads them; they are the same in all sets."""
    made = kernel.prepared(sets[0])
    return [given | made for given in sets]


def between(of: Format, model: Model, tokens: int) -> Arguments:
    """What is between the launches for many tokens: the gated activation and the products."""
    pairs = tokens * model.k
    act = normal(pairs, model.inner)
    made = {"act": act} if of.dtype == torch.bfloat16 else quantized(of, act, "act")
    return made | {"products": normal(pairs, model.hidden)}


def packed_launches(
    model: Model, given: Arguments, tile: "FragmentTile"
) -> dict[str, Callable[[], Any]]:
    """The PARTS of the kernels for 4-bit weights, each by itself."""
    from atomc.kernels.triton.experts.experts_4_bits import PairsOfExperts
    from atomc.kernels.triton.experts.weighted_sum import weighted_sum
    from atomc.kernels.triton.rows.gate import GateConstants

    sort = partial(PairsOfExperts, given["ids"], model.experts, tile)
    of = {"int4": "group" in given, "group": given.get("group", 32), "out_dtype": torch.bfloat16}
    parts: dict[str, Callable[[], Any]] = {"sort": sort}
    for part, x, name, gate in (
        ("up", "x", "w13", GateConstants(**model.gate)),
        ("down", "act", "w2", None),
    ):
        weights = *given[name], *given[f"{name}_scale"], None
        bias = given.get("b13" if part == "up" else "b2")
        parts[part] = partial(sort().multiply, given[x], *weights, bias, **of, gate=gate)
    parts["sum"] = partial(
        weighted_sum, given["products"], given["ids"], given["weights"], model.experts
    )
    return parts


def launches(model: Model, given: Arguments, tile: Any) -> dict[str, Callable[[], Any]]:
    """The PARTS of the kernels for many tokens, each by itself; without the quantizer."""
    from atomc.kernels.triton.experts import grouped
    from atomc.kernels.triton.experts.expert_sort import expert_blocks
    from atomc.kernels.triton.experts.weighted_sum import weighted_sum
    from atomc.kernels.triton.rows.gate import GateConstants

    if isinstance(given["w13"], tuple):
        return packed_launches(model, given, tile)
    ids = given["ids"]
    sort = partial(expert_blocks, ids, model.experts, tile["BLOCK_M"])
    routing, pairs = sort(), ids.numel()
    w13, w2, w13_scale, w2_scale, b13, b2 = map(
        given.get, ("w13", "w2", "w13_scale", "w2_scale", "b13", "b2")
    )
    product = partial(
        grouped.grouped_product,
        routing=routing,
        pairs=pairs,
        out_dtype=torch.bfloat16,
        square=given.get("block", 0),
        tile=tile,
    )
    gate = GateConstants(**model.gate)
    up = partial(product, given["x"], given.get("x_scale"), w13, w13_scale, b13, gate=gate)
    down = partial(product, given["act"], given.get("act_scale"), w2, w2_scale, b2)
    add = partial(weighted_sum, given["products"], ids, given["weights"], model.experts)
    return dict(zip(PARTS, (sort, up, down, add), strict=True))


class Call(NamedTuple):
    """A line to measure: the whole op or a part of it, with the arguments of several calls."""

    part: str
    kernel: str
    function: Callable[..., Any]
    sets: list[Arguments]


def apart(
    of: Format,
    model: Model,
    sets: list[Arguments],
    tiles: "Iterable[Launch | FragmentTile]",
) -> Iterator[Call]:
    """The launches for many tokens, each by itself, with each of the tiles."""
    shared = between(of, model, len(sets[0]["x"]))
    for tile in tiles:
        numbers = tile if of.tiles == WORDS else tile.values()
        label = ",".join(map(str, numbers))
        each = [launches(model, given | shared, tile) for given in sets]
        for part in PARTS:
            yield Call(part, label, lambda run: run(), [{"run": every[part]} for every in each])


def taken_tile(of: Format, model: Model, given: Arguments) -> "Launch | FragmentTile":
    """The tile of the kernels for many tokens."""
    from atomc.kernels.triton.experts.experts_4_bits import PairsOfExperts
    from atomc.kernels.triton.experts.experts_prefill import tile_for
    from atomc.kernels.triton.launch import tiles

    if of.tiles == WORDS:
        return PairsOfExperts(given["ids"], model.experts).tile
    return tile_for(getattr(tiles, of.tiles), given["x"].dtype, given["ids"], model.experts)


def router_apart(tokens: int, sets: list[Arguments]) -> Iterator[Call]:
    """The linear layer of a router and its choice, which are two ops by default."""
    inputs = [{"x": each["x"], "weight": each["weight"]} for each in sets]
    given = {name: sets[0][name] for name in ("k", "renormalize")}
    choices = [{"logits": F.linear(**each)} | given for each in inputs]
    for part, op, arguments in (
        ("linear", "linear", inputs),
        ("choice", "topk_route", choices),
    ):
        found = chosen(op, tokens, arguments[0])
        assert not isinstance(found, str), found
        module = found.function.__module__.rpartition(".")[2]
        yield Call(part, f"{found.provider} {module}", found.function, arguments)


def calls(
    of: Format,
    model: Model,
    sets: list[Arguments],
    found: Kernel,
    args: argparse.Namespace,
) -> Iterator[Call]:
    """What the options ask to be timed, given the kernel that is taken."""
    from atomc.kernels.triton.experts.expert_sort import pairs_per_expert

    tokens = len(sets[0]["x"])
    function = found.function
    module = function.__module__
    kernel = f"{found.provider} {module.rpartition('.')[2]}"
    if not of.tiles:
        yield Call("route", kernel, function, sets)
        if args.parts:
            yield from router_apart(tokens, sets)
        return

    def under(tile: "ExpertsFewTile", **arguments: Any) -> Any:
        with mock.patch(f"{module}.EXPERTS_FEW", SimpleNamespace(choose=lambda *sizes: tile)):
            return function(**arguments)

    per_expert = pairs_per_expert(tokens * model.k, model.experts)
    is_few = "experts_decode" in module
    if args.tiles and is_few:
        for few in few_tiles():
            yield Call("experts", ",".join(map(str, few)), partial(under, few), sets)
    elif args.tiles:
        worth = fragment_tiles if of.tiles == WORDS else grouped_tiles
        every = apart(of, model, sets, worth(per_expert))
        yield from (call for call in every if call.part in ("up", "down"))
    else:
        yield Call("experts", kernel, function, sets)
        if args.parts and not is_few:
            yield from apart(of, model, sets, [taken_tile(of, model, sets[0])])


def size(of: Arguments, *prefixes: str) -> int:
    """Bytes of the tensors whose names begin so."""
    return sum(
        t.numel() * t.element_size()
        for name, t in of.items()
        if isinstance(t, Tensor) and name.startswith(prefixes)
    )


def work(part: str, model: Model, sets: list[Arguments]) -> tuple[float, float]:
    """Bytes that a call must move, on average, and its floating-point operations."""
    given = sets[0]
    tokens, x = len(given["x"]), size(given, "x")
    if part == "choice":
        return 2 * tokens * model.experts, 0
    if part in ("route", "linear"):
        return x + size(given, "weight"), 2 * tokens * model.experts * model.hidden
    pairs = tokens * model.k
    ids, act, out = size(given, "ids"), 2 * pairs * model.inner, 2 * tokens * model.hidden
    products, multiplied = out * model.k, 2 * pairs * model.hidden * model.inner
    hit = sum(len(each["ids"].unique()) for each in sets) / len(sets) / model.experts
    w13, w2 = hit * size(given, "w13", "b13"), hit * size(given, "w2", "b2")
    return {
        "experts": (x + size(given, "ids", "weights") + w13 + w2 + out, 3 * multiplied),
        "sort": (ids, 0),
        "up": (x + w13 + act, 2 * multiplied),
        "down": (act * given["x"].element_size() / 2 + w2 + products, multiplied),
        "sum": (products + out, 0),
    }[part]


def cases(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Call]]:
    """The head of a line, with the bytes and operations of a call, and the call."""
    for name in args.formats:
        of = FORMATS[name]
        for model_name in args.models:
            model = MODELS[model_name]
            if model.hidden % of.group or model.inner % of.group:
                print(f"{name} of {model_name}: rows are no multiple of {of.group}", flush=True)
                continue
            weights = of.weights(model)
            for tokens in args.tokens:
                # Of few tokens so many that the L2 cache does not hold the experts of all.
                count = 1 if args.compile_only else 12 if tokens <= 64 else 4
                sets = [weights | rows(of, model, tokens) for _ in range(count)]
                found = chosen(of.op, tokens, sets[0])
                if isinstance(found, str):
                    print(f"{name} of {model_name}, {tokens} tokens: {found}", flush=True)
                    continue
                read = prepared(found, sets)
                for call in calls(of, model, read, found, args):
                    num_bytes, flops = work(call.part, model, sets)
                    head = {"format": name, "model": model_name, "tokens": tokens}
                    yield head | {"mb": num_bytes / 1e6, "gflop": flops / 1e9}, call


def measured(head: dict[str, Any], call: Call, bandwidth: float) -> dict[str, Any]:
    us = microseconds(call.function, call.sets, 2 * len(call.sets), 9)
    gbs = head["mb"] / us * 1e3
    return head | {
        "part": call.part,
        "kernel": call.kernel,
        "us": us,
        "gbs": gbs,
        "share": gbs * 1e9 / bandwidth,
        "tflops": head["gflop"] / us * 1e3,
    }


def print_fastest(lines: list[dict[str, Any]]) -> None:
    """The five fastest tiles of each case."""
    ranked: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        case = line["format"], line["model"], line["tokens"], line["part"]
        ranked.setdefault(case, []).append(line)
    print()
    for case, these in ranked.items():
        fastest = sorted(these, key=lambda line: line["us"])[:5]
        print(*case, "  ".join(f"{line['kernel']} {line['us']:.2f}" for line in fastest))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="*", default=tuple(FORMATS), choices=tuple(FORMATS))
    parser.add_argument(
        "--models", nargs="*", default=("qwen3-30b", "gpt-oss-20b"), choices=tuple(MODELS)
    )
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument(
        "--parts",
        action="store_true",
        help="also each launch of the Triton kernels for many tokens, and of the router",
    )
    parser.add_argument(
        "--tiles",
        action="store_true",
        help="all tiles of the Triton kernel that is taken: for few tokens of the whole, for many "
        "of the products with gate and up, and with down",
    )
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--compile-only", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the numbers to this file")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    for provider in ("triton", "torch"):
        if reason := kernels.load(provider):
            sys.exit(reason)
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: CUDA graphs are timed")
    from triton.errors import TritonError

    if args.jobs:
        compile_first(args.jobs)
    bandwidth = 1.0 if args.compile_only else copy_bandwidth()
    about = {
        "command": "python " + " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "copy_gbs": bandwidth / 1e9,
    }
    print(
        f"$ {about['command']}\n{about['device']}, torch {torch.__version__}, copy "
        f"{bandwidth / 1e9:.0f} GB/s\n\n"
        f"{'format':16}{'model':16}{'tokens':>6}  {'part':8}{'kernel':28}{'us':>10}{'GB/s':>7}"
        f"{'share':>7}{'TFLOP/s':>9}",
        flush=True,
    )
    lines = []
    for number, (head, call) in enumerate(cases(args)):
        if not mine(number, args.compile_only):
            continue
        try:
            if args.compile_only:
                call.function(**call.sets[0])
                continue
            line = measured(head, call, bandwidth)
        except TritonError as error:  # a tile may need more shared memory than there is
            print(
                *list(head.values())[:3], call.part, call.kernel, type(error).__name__, flush=True
            )
            continue
        lines.append(line)
        print(
            f"{line['format']:16}{line['model']:16}{line['tokens']:6}  {line['part']:8}"
            f"{line['kernel']:28}{line['us']:10.2f}{line['gbs']:7.0f}{line['share']:7.2f}"
            f"{line['tflops']:9.1f}",
            flush=True,
        )
    if args.tiles:
        print_fastest(lines)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(about | {"lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
