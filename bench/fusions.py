"""Time every fused chain that has a Triton kernel: as one kernel, as our kernels of its parts, and
as Inductor fuses it.

    python bench/fusions.py --jobs 14 --json bench/results/fusions-h200.json
    python bench/fusions.py --quick --jobs 14       # one width, three numbers of tokens

Times are taken as in bench/kernels.py, whose bytes, rotated buffers and copy bandwidth these are,
in bf16. Inductor compiles the chain's meaning in PyTorch with dynamic=True, as a server would have
it: one program for all numbers of tokens but one. "bytes" is how many times the fused kernel's
bytes its parts move, what is between them written and read again: of large tensors, about what
fusing can win. The last lines name the cases from 1,024 tokens on in which the fused kernel is less
than 1.3 times as fast as the parts, and all in which it is over 5% slower than Inductor's.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from kernels import ROTATED_BYTES, WIDTH, copy_bandwidth, microseconds, moved, normal
from torch import Tensor

from atomc import kernels, ops
from atomc.ops.op import refusal
from atomc.ops.schemes import SCHEMES
from atomc.platform import Platform

TOKENS, HIDDEN = (1, 16, 128, 1024, 8192), (1024, 2048, 4096, 8192)
QUICK_TOKENS, QUICK_HIDDEN = (16, 1024, 8192), (4096,)
EPS = 1e-6
GAIN, LOSS, MANY = 1.3, 1.05, 1024

Arguments = dict[str, Any]


class Chain(NamedTuple):
    """A fused op at one width: its tensors for some tokens, our kernels of its parts, and its
    meaning for Inductor.

    attributes  the arguments of all three that say how
    between     values of the activation that the parts write or read and the fused kernel does not,
                of some arguments
    """

    name: str
    op: str
    shape: str
    make: Callable[[int], Arguments]
    parts: Callable[..., Any]
    meaning: Callable[..., Any]
    attributes: Arguments
    between: Callable[[Arguments], int]


def sizes(*names: str) -> Callable[[Arguments], int]:
    """How many values these arguments have together: each as often as it is named."""
    return lambda arguments: sum(arguments[name].numel() for name in names)


def kernel(op: str) -> Callable[..., Any]:
    return next(
        kernel.function for kernel in ops.REGISTRY[op].kernels if kernel.provider == "triton"
    )


def quantize(y: Tensor, scale: Tensor | None, scheme: str) -> Any:
    return kernel(f"quant_{scheme}")(y, *([] if scale is None else [scale]))


def norm_then_quant(
    x: Tensor, weight: Tensor, eps: float, scale: Tensor | None = None, *, scheme: str
) -> Any:
    return quantize(kernel("rms_norm")(x, weight, eps), scale, scheme)


def add_norm_then_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    *,
    scheme: str,
) -> Any:
    y, total = kernel("add_rms_norm")(x, residual, weight, eps)
    return quantize(y, scale, scheme), total


def gate_then_quant(gate: Tensor, up: Tensor, scale: Tensor | None = None, *, scheme: str) -> Any:
    return quantize(kernel("silu_and_mul")(gate, up), scale, scheme)


def add_then(norm: str, x: Tensor, residual: Tensor, *rest: Any, **more: Any) -> Any:
    total = x + residual
    return kernel(norm)(total, *rest, **more), total


def add_norm_then_pad(x: Tensor, residual: Tensor, weight: Tensor, eps: float, columns: int) -> Any:
    y, total = kernel("add_rms_norm")(x, residual, weight, eps)
    return torch.nn.functional.pad(y, (0, columns)), total


def norm_then_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return residual + kernel("rms_norm")(x, weight, eps)


def norm_add_then_norm(
    x: Tensor,
    residual: Tensor,
    x_weight: Tensor,
    sum_weight: Tensor,
    x_eps: float,
    sum_eps: float,
) -> Any:
    y = kernel("rms_norm")(x, x_weight, x_eps)
    return kernel("add_rms_norm")(residual, y, sum_weight, sum_eps)


def linear_then_gate(x: Tensor, weight: Tensor, bias: None, activation: str) -> Tensor:
    return kernel("silu_and_mul")(*kernel("linear")(x, weight, None).chunk(2, -1))


def norms_then_ropes(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Any:
    norm, rope = kernel("rms_norm"), kernel("rope")
    return rope(norm(q, q_weight, eps), cos, sin), rope(norm(k, k_weight, eps), cos, sin)


def ropes_then_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *caches: Tensor, **named: Tensor
) -> Any:
    rope = kernel("rope")
    return rope(q, cos, sin), kernel("kv_write")(rope(k, cos, sin), v, *caches, **named)


def norms_ropes_then_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    **named: Any,
) -> Any:
    q_rotated, k_rotated = norms_then_ropes(q, k, **named)
    return q_rotated, kernel("kv_write")(k_rotated, v, k_cache, v_cache, slots)


def written(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    # The op's meaning asks on the host which slots are -1, of which no graph can be made.
    k_cache.flatten(0, 1).index_copy_(0, slots, k)
    v_cache.flatten(0, 1).index_copy_(0, slots, v)


def rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, **caches: Tensor
) -> Tensor:
    written(ops.rope.reference(k, cos, sin), v, **caches)
    return ops.rope.reference(q, cos, sin)


def qk_norm_rope_kv_write(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, **named: Any
) -> Tensor:
    q_rotated, k_rotated = ops.qk_norm_rope.reference(q, k, **named)
    written(k_rotated, v, k_cache, v_cache, slots)
    return q_rotated


def chains(hidden: int) -> Iterator[Chain]:
    inner, q_heads, k_heads = 3 * hidden, max(8, hidden // WIDTH), 8
    heads = f"{q_heads}+{k_heads}x{WIDTH}"

    def normed(tokens: int) -> Arguments:
        return {"x": normal(tokens, hidden), "weight": normal(hidden), "eps": EPS}

    def added(tokens: int) -> Arguments:
        return normed(tokens) | {"residual": normal(tokens, hidden)}

    def added_and_normed(tokens: int) -> Arguments:
        rows = {"x": normal(tokens, hidden), "residual": normal(tokens, hidden)}
        weights = {"x_weight": normal(hidden), "sum_weight": normal(hidden)}
        return rows | weights | {"x_eps": EPS, "sum_eps": EPS}

    def gated(tokens: int) -> Arguments:
        return dict(zip(("gate", "up"), normal(tokens, 2 * inner).chunk(2, -1), strict=True))

    def roped(tokens: int) -> Arguments:
        parts = normal(tokens, (q_heads + k_heads) * WIDTH).split(
            [q_heads * WIDTH, k_heads * WIDTH], -1
        )
        q, k = (part.unflatten(-1, (-1, WIDTH)) for part in parts)
        return {"q": q, "k": k, "cos": normal(tokens, 1, WIDTH), "sin": normal(tokens, 1, WIDTH)}

    def weights() -> Arguments:
        return {"q_weight": normal(WIDTH), "k_weight": normal(WIDTH), "eps": EPS}

    def cached(tokens: int) -> Arguments:
        blocks = max(256, -(-tokens // 16) + 1)
        return {
            "v": normal(tokens, k_heads, WIDTH),
            "k_cache": normal(blocks, 16, k_heads, WIDTH),
            "v_cache": normal(blocks, 16, k_heads, WIDTH),
            "slots": torch.randperm(blocks * 16, device="cuda")[:tokens],
        }

    def scaled(make: Callable[[int], Arguments], scheme: str, tokens: int) -> Arguments:
        scale = {"scale": torch.tensor([0.02], device="cuda")} if scheme == "fp8_static" else {}
        return make(tokens) | scale

    for scheme in SCHEMES:
        for op, shape, make, parts, input in (
            ("rms_norm_quant", hidden, normed, norm_then_quant, "x"),
            ("add_rms_norm_quant", hidden, added, add_norm_then_quant, "x"),
            ("silu_and_mul_quant", inner, gated, gate_then_quant, "gate"),
        ):
            yield Chain(
                f"{op}[{scheme}]",
                op,
                str(shape),
                partial(scaled, make, scheme),
                parts,
                ops.REGISTRY[op].reference,
                {"scheme": scheme},
                sizes(input, input),
            )
    for op, norm in (("add_rms_norm", "rms_norm"), ("add_layer_norm", "layer_norm")):
        biased = {"bias": normal(hidden)} if norm == "layer_norm" else {}
        yield Chain(
            op,
            op,
            str(hidden),
            lambda tokens, biased=biased: added(tokens) | biased,
            partial(add_then, norm),
            ops.REGISTRY[op].reference,
            {},
            sizes("x"),
        )
    yield Chain(
        "rms_norm_add",
        "rms_norm_add",
        str(hidden),
        added,
        norm_then_add,
        ops.rms_norm_add.reference,
        {},
        sizes("x", "x"),
    )
    yield Chain(
        "rms_norm_add_rms_norm",
        "rms_norm_add_rms_norm",
        str(hidden),
        added_and_normed,
        norm_add_then_norm,
        ops.rms_norm_add_rms_norm.reference,
        {},
        sizes("x", "x"),
    )
    yield Chain(
        "add_rms_norm_pad",
        "add_rms_norm_pad",
        f"{hidden}+192",
        added,
        add_norm_then_pad,
        ops.add_rms_norm_pad.reference,
        {"columns": 192},
        sizes("x", "x"),
    )
    yield Chain(
        "linear_gated",
        "linear_gated",
        f"{hidden}->2x{inner}",
        lambda tokens: {"x": normal(tokens, hidden), "weight": normal(2 * inner, hidden)},
        linear_then_gate,
        ops.linear_gated.reference,
        {"bias": None, "activation": "silu"},
        lambda arguments: 4 * arguments["x"].shape[0] * inner,
    )
    yield Chain(
        "qk_norm_rope",
        "qk_norm_rope",
        heads,
        lambda tokens: roped(tokens) | weights(),
        norms_then_ropes,
        ops.qk_norm_rope.reference,
        {},
        sizes("q", "q", "k", "k"),
    )
    yield Chain(
        "rope_kv_write",
        "rope_kv_write",
        heads,
        lambda tokens: roped(tokens) | cached(tokens),
        ropes_then_write,
        rope_kv_write,
        {},
        sizes("k", "k"),
    )
    yield Chain(
        "qk_norm_rope_kv_write",
        "qk_norm_rope_kv_write",
        heads,
        lambda tokens: roped(tokens) | weights() | cached(tokens),
        norms_ropes_then_write,
        qk_norm_rope_kv_write,
        {},
        sizes("q", "q", "k", "k", "k", "k"),
    )


def declared(chain: Chain, tokens: int, arguments: Arguments) -> bool:
    """Whether the kernel is meant for so many tokens and takes these arguments."""
    fused = next(kernel for kernel in ops.REGISTRY[chain.op].kernels if kernel.provider == "triton")
    return (
        tokens in fused.tokens
        and refusal(fused, Platform.detect("cuda"), arguments | chain.attributes) is None
    )


def measure(
    chain: Chain, tokens: int, inductor: Callable[..., Any], bandwidth: float, replays: int
) -> dict[str, Any]:
    arguments, fused = chain.make(tokens), partial(kernel(chain.op), **chain.attributes)
    num_bytes = moved(arguments, fused(**arguments))
    sets = [arguments] + [
        chain.make(tokens) for _ in range(min(32, max(2, -(-ROTATED_BYTES // num_bytes))) - 1)
    ]
    calls = 32 if tokens <= 128 else 8
    ways = {
        "us": fused,
        "parts_us": partial(chain.parts, **chain.attributes),
        "inductor_us": inductor,
    }
    line: dict[str, Any] = {
        "chain": chain.name,
        "shape": chain.shape,
        "tokens": tokens,
        "bytes": num_bytes,
    }
    line["parts_bytes"] = num_bytes + chain.between(arguments) * torch.bfloat16.itemsize
    line |= {name: microseconds(call, sets, calls, replays) for name, call in ways.items()}
    line |= {"gbs": num_bytes / line["us"] / 1e3, "share": num_bytes / line["us"] * 1e6 / bandwidth}
    line |= {
        "over_parts": line["parts_us"] / line["us"],
        "over_inductor": line["inductor_us"] / line["us"],
    }
    return line | {"declared": declared(chain, tokens, arguments)}


def compiled(chain: Chain) -> Callable[..., Any]:
    return torch.compile(
        lambda **tensors: chain.meaning(**tensors, **chain.attributes), dynamic=True
    )


def text(line: dict[str, Any]) -> str:
    return (
        f"{line['chain']:36}{line['shape']:>12}{line['tokens']:7}{line['us']:9.2f}{line['gbs']:8.0f}"
        f"{line['share']:7.2f}{line['parts_us']:10.2f}{line['over_parts']:7.2f}"
        f"{line['parts_bytes'] / line['bytes']:7.2f}{line['inductor_us']:13.2f}{line['over_inductor']:7.2f}"
        f"{'' if line['declared'] else '  not declared'}"
    )


def compile_first(jobs: int) -> None:
    """Run this command in so many processes, which only compile, so that the caches of Triton and
    Inductor are filled.
    """
    command = [sys.executable, *sys.argv, "--jobs", "0", "--compile-only"]
    processes = [
        subprocess.Popen([*command, f"{i}/{jobs}"], stdout=subprocess.DEVNULL) for i in range(jobs)
    ]
    for process in processes:
        process.wait()


def mine(number: int, share: str | None) -> bool:
    """Whether the case of this number belongs to the process that has this share, "i/n", of
    them.
    """
    if share is None:
        return True
    i, n = share.split("/")
    return number % int(n) == int(i)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chains", nargs="*", help="only those that begin so")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--hidden", nargs="*", type=int)
    parser.add_argument(
        "--quick", action="store_true", help=f"tokens {QUICK_TOKENS}, hidden {QUICK_HIDDEN}"
    )
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--compile-only", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    if reason := kernels.load("triton"):
        sys.exit(reason)
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU: CUDA graphs are timed")
    tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    hidden = args.hidden or (QUICK_HIDDEN if args.quick else HIDDEN)
    torch._dynamo.config.cache_size_limit = 64
    found = [
        chain
        for size in hidden
        for chain in chains(size)
        if not args.chains or chain.name.startswith(tuple(args.chains))
    ]
    if args.compile_only:
        for chain in (
            chain for number, chain in enumerate(found) if mine(number, args.compile_only)
        ):
            inductor = compiled(chain)
            for count in tokens:
                measure(chain, count, inductor, 1.0, 1)
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
        f"{bandwidth / 1e9:.0f} GB/s, bf16\n"
    )
    print(
        f"{'chain':36}{'shape':>12}{'tokens':>7}{'us':>9}{'GB/s':>8}{'share':>7}{'parts us':>10}{'ratio':>7}"
        f"{'bytes':>7}{'inductor us':>13}{'ratio':>7}"
    )
    lines = []
    for chain in found:
        torch._dynamo.reset()
        inductor = compiled(chain)
        for count in tokens:
            lines.append(measure(chain, count, inductor, bandwidth, 9))
            print(text(lines[-1]), flush=True)
    small = [line for line in lines if line["tokens"] >= MANY and line["over_parts"] < GAIN]
    slow = [line for line in lines if line["over_inductor"] < 1 / LOSS and line["declared"]]
    for title, those in (
        (f"less than {GAIN} times as fast as the parts", small),
        ("slower than Inductor's", slow),
    ):
        print(f"\n{len(those)} of {len(lines)} {title}")
        print("\n".join(map(text, those)))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(about | {"lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
