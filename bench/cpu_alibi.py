"""Attention with ALiBi, written out, on a CPU: what a bias for each head costs.

    python bench/cpu_alibi.py --rounds 40 --threads 1 | tee bench/results/cpu-alibi.txt
    python bench/cpu_alibi.py --rounds 60 --threads 2 | tee -a bench/results/cpu-alibi.txt

8 heads of 64. All ways run in this process, one call of each in turn; figures are milliseconds of
one layer, over --rounds: of one thread medians of processor time; of more threads the fastest tenth
of wall time, for a core that another program takes stops all threads.
    arguments   one layer, whose bias and mask are arguments
    positions   four layers, one after the other, that read a bias and a mask which the graph builds
                from positions
    eager, inductor   the written form
    left        the written form by atomc without the rewrite `attention`
    kernel      scaled_dot_product_attention with the same bias, by atomc
    atom        the written form by atomc: it should be the faster one of left and kernel

Where eager is faster than left and inductor, it is not the kernel's matter: the call of a compiled
graph costs 0.015 to 0.02 ms, as much as attention of 16 queries, and `positions` pays it once for
four layers; and Inductor's float32 softmax with a mask that is an argument takes up to a third
longer than eager's ops, with a mask of positions it does not.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.platform import Platform

HEADS, WIDTH, LAYERS = 8, 64, 4
SIZES = ((1, 256), (1, 4096), (16, 16), (16, 1024), (64, 64), (128, 128), (256, 256))
LARGE = ((512, 512), (1024, 1024))


def written(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * WIDTH**-0.5 + alibi
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v


def by_kernel(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, hidden: Tensor) -> Tensor:
    mask = alibi.masked_fill(hidden, torch.finfo(alibi.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, mask[None])


def from_positions(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """alibi [HEADS, 1, keys] and hidden [queries, keys]."""
    columns = torch.arange(keys)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
    rows = torch.arange(queries)[:, None] + keys - queries
    return (slopes * (columns - keys + 1)).to(dtype), columns > rows


def of_layers(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """LAYERS of attention to the same keys, each with the result of the one before as queries."""

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks = from_positions(q.shape[-2], k.shape[-2], q.dtype)
        for _ in range(LAYERS):
            q = attention(q, k, v, *masks)
        return q

    return layers


def measure(form: str, args: tuple[Tensor, ...], rounds: int) -> dict[str, float]:
    torch._dynamo.reset()
    by_hand, sdpa = written, by_kernel
    if form == "positions":
        by_hand, sdpa, args = of_layers(written), of_layers(by_kernel), args[:3]
    left = {"passes": {"attention": False}}
    ways = {
        "eager": by_hand,
        "inductor": torch.compile(by_hand, dynamic=False),
        "left": torch.compile(by_hand, backend="atom", dynamic=False, options=left),
        "kernel": torch.compile(sdpa, backend="atom", dynamic=False),
        "atom": torch.compile(by_hand, backend="atom", dynamic=False),
    }
    one = torch.get_num_threads() == 1
    clock = time.thread_time if one else time.perf_counter
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 3):
        for way, call in ways.items():
            start = clock()
            call(*args)
            times[way].append(clock() - start)
    layers = LAYERS if form == "positions" else 1
    return {
        way: 1e3 / layers * statistics.quantiles(taken[3:], n=10)[4 if one else 0]
        for way, taken in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", default=60, type=int, help="a sixth of it for large sizes")
    parser.add_argument("--threads", default=[1, 2], type=int, nargs="+")
    parser.add_argument("--dtypes", default=["bfloat16", "float32"], nargs="+")
    arguments = parser.parse_args()
    print(" ".join(["python", *sys.argv]))
    print(f"{Platform.detect('cpu').name}, torch {torch.__version__}\n")
    ways = ("eager", "inductor", "left", "kernel", "atom")
    print(f"threads  {'dtype':9}{'queries':>8}{'keys':>6}  {'form':9}", end="")
    print("".join(f"{way:>10}" for way in ways))
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype in arguments.dtypes:
            for size in SIZES + LARGE:
                print_rows(*size, dtype, arguments.rounds // (6 if size in LARGE else 1))


@torch.inference_mode()
def print_rows(queries: int, keys: int, dtype_name: str, rounds: int) -> None:
    dtype = getattr(torch, dtype_name)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH).to(dtype) for n in (queries, keys, keys))
    args = q, k, v, *from_positions(queries, keys, dtype)
    threads = torch.get_num_threads()
    for form in ("arguments", "positions"):
        figures = "".join(f"{ms:10.3f}" for ms in measure(form, args, rounds).values())
        print(f"{threads:7}  {dtype_name:9}{queries:8}{keys:6}  {form:9}{figures}", flush=True)


if __name__ == "__main__":
    main()
