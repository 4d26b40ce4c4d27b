"""Time kernels against the meaning of their op run eagerly and against what torch ships, from
decode to prefill.

    python bench/kernels.py --json bench/results/kernels-h200.json

A time is that of one call among many in one CUDA graph, over buffers that together exceed the L2
cache; the median of the replays. Where there is no GPU, calls are timed one after another on the
CPU. Bytes are those that must move: inputs once, outputs once. The share is that of a large copy's
bandwidth.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import kernels, ops
from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform

TOKENS = (1, 8, 64, 1024, 8192)
# Of Qwen3-0.6B and Qwen3-8B: query heads, key/value heads, intermediate width. Heads are 128 wide.
SHAPES = {1024: (16, 8, 3072), 4096: (32, 8, 12288)}
WIDTH, VOCABULARY, EPS = 128, 151936, 1e-6
ROTATED_BYTES = 160 * 10**6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Arguments = dict[str, Any]


class Case(NamedTuple):
    """Arguments of an op, and the call that torch ships for the same (None: there is none)."""

    op: str
    label: str
    make: Callable[[], Arguments]
    library: Callable[..., Any] | None = None


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def cases(tokens: int, hidden: int) -> Iterator[Case]:
    q_heads, k_heads, inner = SHAPES[hidden]
    row = f"{hidden}"

    def normed() -> Arguments:
        return {"x": normal(tokens, hidden), "weight": normal(hidden), "eps": EPS}

    def added() -> Arguments:
        return normed() | {"residual": normal(tokens, hidden)}

    def added_and_normed() -> Arguments:
        rows = {"x": normal(tokens, hidden), "residual": normal(tokens, hidden)}
        weights = {"x_weight": normal(hidden), "sum_weight": normal(hidden)}
        return rows | weights | {"x_eps": EPS, "sum_eps": EPS}

    def gated() -> Arguments:
        gate, up = normal(tokens, 2 * inner).chunk(2, -1)
        return {"gate": gate, "up": up}

    def heads() -> tuple[Tensor, ...]:
        widths = [count * WIDTH for count in (q_heads, k_heads, k_heads)]
        return tuple(
            part.unflatten(-1, (-1, WIDTH))
            for part in normal(tokens, sum(widths)).split(widths, -1)
        )

    def tables() -> Arguments:
        return {"cos": normal(tokens, 1, WIDTH), "sin": normal(tokens, 1, WIDTH)}

    def caches() -> Arguments:
        blocks = max(256, -(-tokens // 16) + 1)
        slots = torch.randperm(blocks * 16, device=DEVICE)[:tokens]
        return {
            "k_cache": normal(blocks, 16, k_heads, WIDTH),
            "v_cache": normal(blocks, 16, k_heads, WIDTH),
            "slots": slots,
        }

    def qk_weights() -> Arguments:
        return {"q_weight": normal(WIDTH), "k_weight": normal(WIDTH), "eps": EPS}

    yield Case(
        "rms_norm", row, normed, lambda x, weight, eps: F.rms_norm(x, x.shape[-1:], weight, eps)
    )
    yield Case(
        "add_rms_norm",
        row,
        added,
        lambda x, residual, weight, eps: F.rms_norm(x.add(residual), x.shape[-1:], weight, eps),
    )
    yield Case(
        "rms_norm_add",
        row,
        added,
        lambda x, residual, weight, eps: residual + F.rms_norm(x, x.shape[-1:], weight, eps),
    )
    yield Case("rms_norm_add_rms_norm", row, added_and_normed)
    yield Case(
        "layer_norm",
        row,
        lambda: normed() | {"bias": normal(hidden)},
        lambda x, weight, bias, eps: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    )
    yield Case("add_layer_norm", row, lambda: added() | {"bias": normal(hidden)})
    yield Case("silu_and_mul", f"{inner}", gated)
    yield Case("gelu_and_mul", f"{inner}", gated)
    yield Case("rope", f"{q_heads}x{WIDTH}", lambda: tables() | {"x": heads()[0]})
    yield Case(
        "rotary_tables",
        str(WIDTH),
        lambda: {
            "positions": torch.arange(tokens, device=DEVICE)[:, None],
            "inv_freq": 1e4 ** -torch.linspace(0, 1, WIDTH // 2, device=DEVICE),
            "dtype": torch.bfloat16,
        },
    )
    both = f"{q_heads}+{k_heads}x{WIDTH}"
    yield Case(
        "qk_norm_rope",
        both,
        lambda: dict(zip(("q", "k"), heads(), strict=False)) | qk_weights() | tables(),
    )
    yield Case(
        "kv_write",
        f"{k_heads}x{WIDTH}",
        lambda: dict(zip(("k", "v"), heads()[1:], strict=True)) | caches(),
    )
    yield Case(
        "rope_kv_write",
        both,
        lambda: dict(zip(("q", "k", "v"), heads(), strict=True)) | tables() | caches(),
    )
    yield Case(
        "qk_norm_rope_kv_write",
        both,
        lambda: (
            dict(zip(("q", "k", "v"), heads(), strict=True)) | qk_weights() | tables() | caches()
        ),
    )
    if tokens > 64:
        return
    qkv = (q_heads + 2 * k_heads) * WIDTH
    for k, n in (
        (hidden, qkv),
        (q_heads * WIDTH, hidden),
        (hidden, 2 * inner),
        (inner, hidden),
        (hidden, VOCABULARY),
    ):
        yield Case(
            "linear",
            f"{k}->{n}",
            lambda k=k, n=n: {"x": normal(tokens, k), "weight": normal(n, k)},
            F.linear,
        )


def moved(arguments: Arguments, result: Any) -> int:
    """Bytes that a call must move: arguments but the caches, of which it writes what v and k hold;
    and results.
    """
    read = [
        value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and "cache" not in name
    ]
    written = [value for value in (result if isinstance(result, tuple) else (result,))]
    written += [
        value for name, value in arguments.items() if name in ("k", "v") and "k_cache" in arguments
    ]
    return sum(value.numel() * value.element_size() for value in read + written)


def microseconds(
    call: Callable[..., Any], sets: list[Arguments], calls: int, replays: int = 15
) -> float:
    """Median time of one call among at least so many, each on the next of the sets."""
    rounds = -(-calls // len(sets))
    results: list[Any] = [None] * len(sets)

    def run() -> None:
        for _ in range(rounds):
            for i, arguments in enumerate(sets):
                results[i] = call(**arguments)

    call(**sets[0])
    timed = captured(run) if DEVICE == "cuda" else run
    return 1e6 * statistics.median(seconds(timed) for _ in range(replays)) / (rounds * len(sets))


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The replay of a CUDA graph of what this launches."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return graph.replay


def seconds(run: Callable[[], Any]) -> float:
    if DEVICE == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def copy_bandwidth() -> float:
    """Bytes a second of a copy between two large buffers, read plus written. (As a node of a graph
    it is slower.)
    """
    source = torch.empty(
        2**32 if DEVICE == "cuda" else 2**28, dtype=torch.uint8, device=DEVICE
    ).random_()
    target = torch.empty_like(source)
    return (
        2
        * source.numel()
        / statistics.median(seconds(lambda: target.copy_(source)) for _ in range(8))
    )


def serving(case: Case, arguments: Arguments, tokens: int, provider: str) -> Kernel | str:
    """The provider's kernel for these arguments, or why it has none."""
    here, reason = Platform.detect(DEVICE), f"{provider} has no {case.op}"
    for kernel in ops.REGISTRY[case.op].kernels:
        if kernel.provider != provider:
            continue
        if refused := refusal(kernel, here, arguments):
            reason = refused.text
        elif tokens in (meant := kernel.tokens_for(here, arguments)):
            return kernel
        else:
            reason = f"is meant for {meant} tokens"
    return reason


def prepared(kernel: Kernel, arguments: Arguments) -> Arguments:
    """The arguments as the kernel takes them: weights in a layout of its own."""
    return arguments | kernel.prepared(arguments)


def measure(case: Case, tokens: int, provider: str, bandwidth: float) -> dict[str, Any]:
    arguments = {name: value for name, value in case.make().items()}
    signature = ops.REGISTRY[case.op].signature
    meaning = ops.REGISTRY[case.op].reference
    num_bytes = moved(arguments, meaning(**arguments))
    sets = [arguments]
    sets += [case.make() for _ in range(min(64, max(2, math.ceil(ROTATED_BYTES / num_bytes))) - 1)]
    calls = 64 if tokens <= 64 else 16
    line: dict[str, Any] = {
        "op": case.op,
        "shape": case.label,
        "tokens": tokens,
        "bytes": num_bytes,
    }
    kernel = serving(case, signature.bind(**arguments).arguments, tokens, provider)
    if isinstance(kernel, str):
        line["refused"] = kernel
    else:
        line["us"] = microseconds(
            kernel.function, [prepared(kernel, given) for given in sets], calls
        )
        line["gbs"] = num_bytes / line["us"] / 1e3
        line["share"] = num_bytes / line["us"] * 1e6 / bandwidth
    # A meaning that writes asks the slots on the host, which no graph can hold; that of linear is
    # the library's.
    if case.library is not F.linear and not ops.REGISTRY[case.op].mutates:
        line["meaning_us"] = microseconds(meaning, sets, calls)
    if case.library is not None:
        line["library_us"] = microseconds(case.library, sets, calls)
    return line


def text(line: dict[str, Any]) -> str:
    def number(name: str, form: str) -> str:
        return format(line[name], form) if name in line else "-".rjust(int(form.split(".")[0]))

    end = line.get("refused", "")
    return (
        f"{line['op']:22}{line['shape']:14}{line['tokens']:7}{number('us', '10.2f')}{number('gbs', '9.0f')}"
        f"{number('share', '8.2f')}{number('meaning_us', '11.2f')}{number('library_us', '11.2f')}  {end}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--provider", default="triton", choices=kernels.PROVIDERS, help="whose kernels (triton)"
    )
    parser.add_argument("--ops", nargs="*", help="only these ops")
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument(
        "--hidden", nargs="*", type=int, default=tuple(SHAPES), choices=tuple(SHAPES)
    )
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    if reason := kernels.load(args.provider):
        sys.exit(reason)
    bandwidth = copy_bandwidth()
    command = "python " + " ".join(sys.argv)
    about = {
        "command": command,
        "device": Platform.detect(DEVICE).name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "copy_gbs": bandwidth / 1e9,
    }
    print(
        f"$ {command}\n{about['device']}, torch {torch.__version__}, copy "
        f"{bandwidth / 1e9:.0f} GB/s, bf16\n"
    )
    print(
        f"{'op':22}{'shape':14}{'tokens':>7}{'us':>10}{'GB/s':>9}{'share':>8}{'meaning us':>11}{'library us':>11}"
    )
    lines = []
    for hidden in args.hidden:
        for tokens in args.tokens:
            for case in cases(tokens, hidden):
                if not args.ops or case.op in args.ops:
                    lines.append(measure(case, tokens, args.provider, bandwidth))
                    print(text(lines[-1]), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(about | {"lines": lines}, file, indent=1)


if __name__ == "__main__":
    main()
