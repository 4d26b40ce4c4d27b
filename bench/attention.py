"""Time paged attention in Triton beside scaled_dot_product_attention over contiguous keys, on the
GPU that is here.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from atomc import ops
from atomc.kernels.triton.attention.attention import attend, paged_attention
from atomc.kernels.triton.attention.attention_tiles import Tiling, multiprocessors, tiling

EXAMPLES = """examples:
  all cases:              python bench/attention.py --json bench/results/attention-h200.json
  one of them:            python bench/attention.py --only "Qwen3-8B, decode 64 x 1024"
  as in a CUDA graph:     python bench/attention.py --room 40960
  other ways to cut it:   python bench/attention.py --sweep --only decode
"""
WIDTH = 128
HEADS = {"Qwen3-0.6B": (16, 8), "Qwen3-8B": (32, 8), "Qwen3-30B-A3B": (32, 4)}
# Calls rotate over this many bytes of keys and values, several times the L2, as the layers of a
# model do.
ROTATED = 512 * 2**20
REPLAYS = 15


class Case(NamedTuple):
    """Sequences of (new tokens, length)."""

    name: str
    heads: tuple[int, int]
    sequences: tuple[tuple[int, int], ...]

    @property
    def uniform(self) -> bool:
        return len(set(self.sequences)) == 1

    @property
    def bytes(self) -> int:
        """Each new token's query and output, each key and value, once."""
        new, keys = (sum(s[i] for s in self.sequences) for i in (0, 1))
        return 2 * WIDTH * 2 * (new * self.heads[0] + keys * self.heads[1])

    @property
    def flops(self) -> int:
        seen = sum(new * (length - new) + new * (new + 1) // 2 for new, length in self.sequences)
        return 4 * WIDTH * self.heads[0] * seen


def cases() -> list[Case]:
    shapes = {
        f"decode {batch} x {keys}": ((1, keys),) * batch
        for batch, keys in product((1, 8, 64), (1024, 8192))
    }
    shapes |= {
        f"prefill {batch} x {tokens}": ((tokens, tokens),) * batch
        for batch, tokens in ((1, 1024), (1, 8192), (16, 1024))
    }
    shapes["mixed 63 x 1024, a chunk of 512 of 1024"] = ((1, 1024),) * 63 + ((512, 1024),)
    return [
        Case(f"{model}, {name}", heads, sequences)
        for model, heads in HEADS.items()
        for name, sequences in shapes.items()
    ]


class Inputs(NamedTuple):
    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor


def inputs(
    case: Case, block_size: int, room: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Block tables have room for the longest sequence, or for `room` tokens if that is more."""
    torch.manual_seed(0)
    new, lengths = zip(*case.sequences, strict=True)
    per_sequence = -(-max(lengths) // block_size)
    blocks = per_sequence * len(lengths)
    size = 2 * 2 * blocks * block_size * case.heads[1] * WIDTH
    shape = (blocks, block_size, case.heads[1], WIDTH)
    caches = [
        (
            torch.randn(shape, device="cuda", dtype=dtype),
            torch.randn(shape, device="cuda", dtype=dtype),
        )
        for _ in range(min(64, max(1, ROTATED // size)))
    ]
    starts = torch.tensor((0, *new)).cumsum(0)
    tables = torch.zeros(len(lengths), max(per_sequence, room // block_size), dtype=torch.int32)
    tables[:, :per_sequence] = torch.randperm(blocks).view(len(lengths), per_sequence)
    return Inputs(
        torch.randn(sum(new), case.heads[0], WIDTH, device="cuda", dtype=dtype),
        caches,
        starts.int().cuda(),
        torch.tensor(lengths).int().cuda(),
        tables.cuda(),
    )


def microseconds(calls: list[Callable[[], object]]) -> float:
    """One call's time when a CUDA graph of all of them is replayed; the median of the replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        calls[-1]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times[2:]) * 1e3 / len(calls)


def at_least(calls: list[Callable[[], object]], number: int = 8) -> list[Callable[[], object]]:
    return calls * -(-number // len(calls))


def ours(given: Inputs, cut: Tiling | None = None) -> list[Callable[[], object]]:
    def call(k: Tensor, v: Tensor) -> Tensor:
        if cut is None:
            return paged_attention(given.q, k, v, *given[2:], given.q, scale=WIDTH**-0.5)
        return attend(given.q, cut, k, v, *given[2:], scale=WIDTH**-0.5)

    return at_least([lambda k=k, v=v: call(k, v) for k, v in given.caches])


def stock(case: Case, given: Inputs, backend: SDPBackend) -> list[Callable[[], object]]:
    """SDPA over the same keys, which it wants side by side and of equal number."""
    batch, causal = len(case.sequences), case.sequences[0][0] > 1
    q = given.q.view(batch, -1, *given.q.shape[1:]).transpose(1, 2)
    dense = [
        [cache.view(batch, -1, *cache.shape[2:]).transpose(1, 2) for cache in pair]
        for pair in given.caches
    ]

    def call(k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return at_least([lambda k=k, v=v: call(k, v) for k, v in dense])


def ceilings() -> tuple[float, float]:
    """Bytes a second of a large copy, and flops of a large matrix product, both in bf16 and on
    random data.
    """
    source = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy = microseconds(at_least([lambda: torch.neg(source, out=target)], 4))
    product = microseconds(at_least([lambda: a @ b], 4))
    return 2 * source.nbytes / copy * 1e6, 2 * 8192**3 / product * 1e6


def error(case: Case, given: Inputs) -> float:
    """Relative to the op's meaning in fp32, on at most two sequences from each end."""
    k, v = given.caches[0]
    out = paged_attention(given.q, k, v, *given[2:], given.q, scale=WIDTH**-0.5)
    bounds = given.query_start.tolist()
    worst = 0.0
    for s in {0, len(case.sequences) - 1}:
        rows = slice(max(bounds[s], bounds[s + 1] - 256), bounds[s + 1])
        new = rows.stop - rows.start
        start = torch.tensor([0, new], dtype=torch.int32, device="cuda")
        tables = given.block_tables[s : s + 1]
        exact = ops.paged_attention.reference(
            given.q[rows].float(),
            k,
            v,
            start,
            given.seq_lens[s : s + 1],
            tables,
            given.q,
            scale=WIDTH**-0.5,
        )
        worst = max(worst, ((out[rows].float() - exact).norm() / exact.norm()).item())
    return worst


def measure(
    case: Case, block_size: int, room: int, bandwidth: float, flops: float
) -> dict[str, Any]:
    given = inputs(case, block_size, room)
    times = {"triton": microseconds(ours(given))}
    if case.uniform:
        times["flash"] = microseconds(stock(case, given, SDPBackend.FLASH_ATTENTION))
        times["cudnn"] = microseconds(stock(case, given, SDPBackend.CUDNN_ATTENTION))
    return {
        "case": case.name,
        "us": times,
        "floor_us": max(case.bytes / bandwidth, case.flops / flops) * 1e6,
        "gb_per_s": case.bytes / times["triton"] / 1e3,
        "tflop_per_s": case.flops / times["triton"] / 1e6,
        "error": error(case, given),
        "cut": chosen(case, given)._asdict(),
    }


def chosen(case: Case, given: Inputs) -> Tiling:
    heads, kv_heads = case.heads
    room = given.block_tables.shape[1] * given.caches[0][0].shape[1]
    return tiling(
        len(given.q),
        len(case.sequences),
        heads // kv_heads,
        kv_heads,
        WIDTH,
        2,
        room,
        given.q.device,
    )


# Other ways to cut the work: rows, keys, warps, stages, registers; for decode also programs per
# multiprocessor.
DECODE_TILES = [
    (16, 32, 4, 3),
    (16, 32, 4, 5),
    (16, 32, 4, 7),
    (16, 64, 4, 3),
    (16, 64, 4, 3, 128),
    (16, 64, 4, 5),
    (16, 64, 4, 5, 168),
    (16, 64, 8, 5),
    (16, 128, 4, 3),
    (16, 128, 8, 5),
]
WIDE_TILES = [
    (128, 128, 8, 3),
    (128, 64, 8, 5),
    (128, 64, 8, 2, 128),
    (128, 64, 8, 3, 128),
    (128, 32, 8, 5, 128),
    (64, 64, 4, 2),
    (64, 64, 4, 5),
    (64, 32, 4, 5),
    (64, 32, 4, 5, 128),
]
PROGRAMS = (1, 2, 3, 4, 6)


def candidates(case: Case) -> Iterator[Tiling]:
    decode = max(new for new, _ in case.sequences) == 1
    longest = max(length for _, length in case.sequences)
    for rows, keys, warps, stages, *registers in DECODE_TILES if decode else WIDE_TILES:
        tiles = len(case.sequences) * case.heads[1]
        sms = multiprocessors(torch.device("cuda"))
        splits = (
            {min(max(1, n * sms // tiles), -(-longest // keys), 128) for n in PROGRAMS}
            if decode
            else {1}
        )
        for number in sorted(splits):
            yield Tiling(rows, keys, number, warps, stages, decode, *registers)


def binary(heads: tuple[int, int], cut: Tiling) -> tuple[object, ...]:
    """What cuts have in common that are compiled alike."""
    return heads, cut._replace(splits=min(cut.splits, 2))


def compile_once(job: tuple[Case, Tiling, int]) -> str | None:
    case, cut, block_size = job
    given = inputs(case, block_size)
    try:
        ours(given, cut)[0]()
        torch.cuda.synchronize()
    except Exception as failure:  # too much shared memory, most often: the sweep goes on without
        return f"{type(failure).__name__}: {failure}".splitlines()[0]
    return None


def sweep(wanted: list[Case], block_size: int) -> None:
    """Each way's time for each case, best first. Kernels are compiled by many processes first, into
    Triton's cache.
    """
    jobs = {
        binary(case.heads, cut): (case._replace(sequences=((1, 1024),)), cut, block_size)
        for case in wanted
        for cut in candidates(case)
    }
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        failures = {
            key: text
            for key, text in zip(jobs, pool.imap(compile_once, jobs.values()), strict=True)
            if text
        }
    for key, text in failures.items():
        print("left out", key, text)
    for case in wanted:
        given = inputs(case, block_size)
        times = {}
        for cut in candidates(case):
            if binary(case.heads, cut) not in failures:
                times[cut] = microseconds(ours(given, cut))
        print(f"{case.name}: chosen {tuple(chosen(case, given))}")
        for cut in sorted(times, key=times.__getitem__):
            print(f"    {times[cut]:9.2f} us  {tuple(cut)}")
        del given


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--block-size",
        type=int,
        default=ops.LAYOUTS["paged"].block_size,
        help="tokens a cache block",
    )
    parser.add_argument(
        "--room",
        type=int,
        default=0,
        help="tokens that block tables have room for, if more than needed",
    )
    parser.add_argument("--sweep", action="store_true", help="time other tilings instead")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    wanted = [case for case in cases() if args.only in case.name]
    if not wanted:
        parser.error(
            f"no case contains {args.only!r}; cases are {', '.join(case.name for case in cases())}"
        )
    if args.sweep:
        sweep(wanted, args.block_size)
        return

    bandwidth, flops = ceilings()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy "
        f"{bandwidth / 1e12:.2f} TB/s, "
        f"matrix product {flops / 1e12:.0f} TFLOP/s, blocks of {args.block_size}, "
        f"tables with room for {args.room or 'the longest'}"
    )
    print(
        f"{'':58}{'triton':>9}{'flash':>9}{'cudnn':>9}{'floor us':>10}{'GB/s':>8}{'TFLOP/s':>9}{'error':>10}"
    )
    results = []
    for case in wanted:
        result = measure(case, args.block_size, args.room, bandwidth, flops)
        results.append(result)
        columns = "".join(
            f"{result['us'].get(name, float('nan')):9.1f}" for name in ("triton", "flash", "cudnn")
        )
        print(
            f"{case.name:58}{columns}{result['floor_us']:10.1f}{result['gb_per_s']:8.0f}"
            f"{result['tflop_per_s']:9.0f}{result['error']:10.2e}",
            flush=True,
        )
    if args.json:
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "bandwidth": bandwidth,
            "flops": flops,
            "block_size": args.block_size,
            "room": args.room,
        }
        args.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
