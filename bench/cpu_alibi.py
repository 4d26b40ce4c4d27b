"""Attention with ALiBi, written out, on one thread of a CPU: what a bias for each head costs.

    python bench/cpu_alibi.py | tee bench/results/cpu-alibi.txt

8 heads of 64, as many keys as queries, or 256 keys for one query. All ways run in this process, one
call of each in turn; figures are medians over --rounds of processor time, in milliseconds:
    eager, inductor, atom   the written form
    kernel                  scaled_dot_product_attention with the same bias, by atomc
"""

import argparse
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc.platform import Platform

HEADS, WIDTH = 8, 64
QUERIES = (1, 16, 64, 128, 256, 512, 1024)


def written(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) * WIDTH**-0.5 + alibi
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v


def by_kernel(q: Tensor, k: Tensor, v: Tensor, alibi: Tensor, hidden: Tensor) -> Tensor:
    mask = alibi.masked_fill(hidden, torch.finfo(alibi.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, mask[None])


def inputs(queries: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    keys = queries if queries > 1 else 256
    q, k, v = (torch.randn(1, HEADS, n, WIDTH).to(dtype) for n in (queries, keys, keys))
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
    alibi = (slopes * (torch.arange(keys) - keys + 1)).to(dtype)
    return q, k, v, alibi, ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def measure(queries: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    torch._dynamo.reset()
    args = inputs(queries, dtype)
    ways = {
        "eager": written,
        "inductor": torch.compile(written, dynamic=False),
        "atom": torch.compile(written, backend="atom", dynamic=False),
        "kernel": torch.compile(by_kernel, backend="atom", dynamic=False),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 3):
        for way, call in ways.items():
            start = time.thread_time()
            call(*args)
            times[way].append(time.thread_time() - start)
    return {way: 1e3 * statistics.median(taken[3:]) for way, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", default=40, type=int)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(" ".join(["python", *sys.argv]))
    print(f"{Platform.detect('cpu').name}, torch {torch.__version__}\n")
    print(f"{'dtype':10}{'queries':>8}{'eager':>10}{'inductor':>10}{'atom':>10}{'kernel':>10}")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for queries in QUERIES:
                times = measure(queries, dtype, arguments.rounds)
                name = str(dtype).removeprefix("torch.")
                print(f"{name:10}{queries:8}" + "".join(f"{ms:10.3f}" for ms in times.values()))


if __name__ == "__main__":
    main()
