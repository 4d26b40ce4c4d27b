"""Time attention over a paged latent cache in Triton (DeepSeek's widths, 512 + 64), on the GPU that
is here: microseconds, the share of the bandwidth of a copy, and TFLOP/s. For DeepSeek-V3.2, also the
parts of sparse attention, and their sum as a share of attention over all keys.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import product

import torch
from fusions import compile_first, mine
from kernels import copy_bandwidth
from torch import Tensor
from triton import next_power_of_2

from atomc.kernels.triton.latent.indexer import choose, index_scores
from atomc.kernels.triton.latent.mla_attention import LatentTiling, attend, tiling
from atomc.kernels.triton.latent.mla_chosen import attend_chosen
from atomc.ops.mla_attention import LatentOperands

EXAMPLES = """examples:
  all cases:           python bench/latent_attention.py
  one of them:         python bench/latent_attention.py --only "16 heads, decode 64 x 8192"
  an fp8 cache:        python bench/latent_attention.py --fp8
  other tilings:       python bench/latent_attention.py --sweep --jobs 14 --only "decode 64"
  sparse attention:    python bench/latent_attention.py --only V3.2
"""
LATENT, WIDTH, BLOCK = 512, 576, 16
CASES = {
    f"{heads} heads, {name}": (heads, sequences)
    for heads, (name, sequences) in product(
        (16, 32, 128),
        {
            "decode 1 x 1024": ((1, 1024),),
            "decode 8 x 8192": ((1, 8192),) * 8,
            "decode 64 x 1024": ((1, 1024),) * 64,
            "decode 64 x 8192": ((1, 8192),) * 64,
            "drafts 64 x 4 of 8192": ((4, 8192),) * 64,
            "prompts 16 x 1024": ((1024, 1024),) * 16,
        }.items(),
    )
}
# Of DeepSeek-V3.2: heads of attention and of its indexer, width of the indexer's keys, chosen keys.
HEADS, INDEX_HEADS, INDEX_WIDTH, CHOSEN = 128, 64, 128, 2048
SPARSE = {
    f"V3.2, {name}": sequences
    for name, sequences in {
        "decode 1 x 32000": ((1, 32000),),
        "decode 8 x 32000": ((1, 32000),) * 8,
        "decode 64 x 4096": ((1, 4096),) * 64,
        "decode 64 x 8192": ((1, 8192),) * 64,
        "decode 64 x 32000": ((1, 32000),) * 64,
        "chunk 2048 of 32000": ((2048, 32000),),
    }.items()
}


class Inputs:
    """The arguments of one step over caches that rotate, several times the L2 in all."""

    def __init__(self, heads: int, sequences: tuple[tuple[int, int], ...], fp8: bool):
        lengths = [length for _, length in sequences]
        blocks = [-(-length // BLOCK) for length in lengths]
        self.bytes = sum(lengths) * WIDTH * (1 if fp8 else 2)
        copies = max(1, min(16, 512 * 2**20 // self.bytes))
        shape = (sum(blocks), BLOCK, WIDTH)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.caches = [torch.randn(shape, device="cuda").to(dtype) for _ in range(copies)]
        new = [count for count, _ in sequences]
        self.q = torch.randn(sum(new), heads, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.starts = _ints([0, *torch.tensor(new).cumsum(0).tolist()])
        self.lengths = _ints(lengths)
        order = iter(torch.randperm(sum(blocks)).tolist())
        self.tables = _ints([[next(order) for _ in range(count)] for count in blocks])
        self.scale = torch.ones(1, device="cuda") if fp8 else None
        seen = sum(n * (length - n) + n * (n + 1) / 2 for n, length in sequences)
        self.flops = 2 * seen * heads * (WIDTH + LATENT)

    def cut(self) -> LatentTiling:
        longest = self.tables.shape[1] * BLOCK
        return tiling(self.q, len(self.lengths), longest, self.caches[0])

    def operands(self, cache: Tensor) -> LatentOperands:
        return LatentOperands(
            kv_cache=cache,
            query_start=self.starts,
            seq_lens=self.lengths,
            block_tables=self.tables,
            kv_scale=self.scale,
            latent=LATENT,
            scale=0.1,
        )

    def calls(self, cut: LatentTiling) -> Iterator[Callable[[], Tensor]]:
        for cache in self.caches:
            yield lambda cache=cache: attend(self.q, cut, **self.operands(cache))


class SparseInputs:
    """The parts of sparse attention of one step, over a cache of `dense`."""

    def __init__(self, dense: Inputs):
        self.dense = dense
        rows, blocks = dense.q.shape[0], dense.caches[0].shape[0]
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn(rows, INDEX_HEADS, INDEX_WIDTH, **like)
        self.weights = torch.randn(rows, INDEX_HEADS, **like)
        self.keys = torch.randn(blocks, BLOCK, INDEX_WIDTH, **like)
        if dense.scale is not None:  # each key with a scale of its own
            codes = self.keys.to(torch.float8_e4m3fn).view(torch.uint8)
            ones = torch.ones(blocks, BLOCK, 1, device="cuda").view(torch.uint8)
            self.keys = torch.cat((codes, ones), -1).view(torch.float8_e4m3fn)
        capacity = dense.tables.shape[1] * BLOCK
        self.scores = torch.empty(rows, capacity, device="cuda")
        self.chosen = torch.empty(rows, CHOSEN, dtype=torch.int32, device="cuda")
        self.cut = tiling(dense.q, rows, CHOSEN, dense.caches[0])

    def score(self) -> Tensor:
        given = self.dense.starts, self.dense.lengths, self.dense.tables
        index_scores(self.q, self.weights, self.keys, self.scores, 0, CHOSEN, *given)
        return self.scores

    def choose(self) -> Tensor:
        choose(self.scores, self.chosen, self.dense.starts, self.dense.lengths, 0)
        return self.chosen

    def attend(self) -> Tensor:
        dense = self.dense
        operands = dense.operands(dense.caches[0])
        return attend_chosen(dense.q, self.cut, self.chosen, **operands)

    def step(self) -> Tensor:
        self.score()
        self.choose()
        return self.attend()


def time_sparse(name: str, sequences: tuple[tuple[int, int], ...], fp8: bool) -> None:
    """Print the time of each part, of a step, and of attention over all keys."""
    dense = Inputs(HEADS, sequences, fp8)
    sparse = SparseInputs(dense)
    parts = {part: getattr(sparse, part) for part in ("score", "choose", "attend", "step")}
    taken = {part: seconds([call] * 8) for part, call in parts.items()}
    of_all = seconds(list(dense.calls(dense.cut())))
    each = ", ".join(f"{part} {time * 1e6:.1f} us" for part, time in taken.items())
    print(f"{name}: {each}; all keys {of_all * 1e6:.1f} us: {taken['step'] / of_all:.0%} of that")


def _ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def seconds(calls: list[Callable[[], Tensor]]) -> float:
    """The median of 15 replays of one CUDA graph of all calls, divided by their number."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[7]


def cuts(chosen: LatentTiling, heads: int, sweep: bool) -> Iterator[LatentTiling]:
    yield chosen
    otherwise = chosen._replace(branches=not chosen.branches)
    if chosen.rows == 64 and chosen.warps == 8:
        yield otherwise
    most = max(16, next_power_of_2(heads))
    for rows, keys, warps, stages, splits, branches in product(
        (16, 32, 64, 128), (16, 32, 64), (4, 8), (1, 2, 3), (1, 2, 4, 8), (False, True)
    ):
        of_tile = -(-heads // -(-heads // rows))
        other = LatentTiling(
            rows, keys, of_tile, splits, warps, stages, chosen.by_sequence, branches
        )
        # In branches the stages are given. Sixteen rows for each warp need none.
        if branches and (stages > 1 or rows >= 16 * warps):
            continue
        if sweep and rows <= most and other not in (chosen, otherwise):
            yield other


def time_dense(name: str, inputs: Inputs, tilings: Iterable[LatentTiling], copied: float) -> None:
    """Print the time of each tiling, the fastest last."""
    lines = []
    for cut in tilings:
        try:
            taken = seconds(list(inputs.calls(cut)))
        except Exception as error:  # too much shared memory, most often: the sweep goes on
            print(f"{name}: {cut}: {type(error).__name__}")
            continue
        text = (
            f"{name}: {taken * 1e6:.1f} us, {inputs.bytes / taken / copied:.0%} of copy "
            f"bandwidth, {inputs.flops / taken / 1e12:.0f} TFLOP/s, {tuple(cut)}"
        )
        lines.append((taken, text))
    for _, text in sorted(lines, reverse=True):
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--fp8", action="store_true", help="over an fp8 cache")
    parser.add_argument("--sweep", action="store_true", help="time other tilings as well")
    parser.add_argument("--jobs", type=int, default=0, help="compile in so many processes first")
    parser.add_argument("--compile-only", metavar="I/N", help="compile every Nth tiling")
    args = parser.parse_args()
    if args.jobs:
        compile_first(args.jobs)
    copied = 0.0 if args.compile_only else copy_bandwidth()
    for name, (heads, sequences) in CASES.items():
        if args.only not in name:
            continue
        inputs = Inputs(heads, sequences, args.fp8)
        tilings = list(cuts(inputs.cut(), heads, args.sweep))
        if not args.compile_only:
            time_dense(name, inputs, tilings, copied)
            continue
        for number, cut in enumerate(tilings):
            if mine(number, args.compile_only):
                with suppress(Exception):  # a tiling that does not fit
                    next(inputs.calls(cut))()
    for name, sequences in SPARSE.items():
        if args.only in name and not args.compile_only:
            time_sparse(name, sequences, args.fp8)


if __name__ == "__main__":
    main()
