"""Time the sum over GPUs of one host with the add and the norm behind it: in one kernel, and by NCCL
with a kernel for the add and the norm, in CUDA graphs.

    python bench/all_reduce.py --json bench/results/all-reduce-h100.json

Starts a process for each rank. Before the times, results are compared with fp32, and the bits of
the ranks with each other, over graphs of several sizes that are replayed in turn. us: of one call,
median of the replays of a graph of CALLS calls on the slowest rank. one launch / two launches: rows
are sent and received by one kernel or by two. A row without a time is too large for the memory of
the one kernel.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, distributed

from atomc import kernels, ops
from atomc.torch_compat import peer_memory

TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
CHECKED = (1, 3, 16, 5, 128)
CALLS, REPLAYS = 50, 30
EPS = 1e-6


class Rank:
    """One process: its group, its GPU and its memory that the others write."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        distributed.init_process_group(
            "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=60),
            device_id=self.device,
        )
        assert distributed.group.WORLD is not None
        self.group = distributed.group.WORLD.group_name
        peer_memory.share(distributed.group.WORLD, self.device)
        self.peers = peer_memory.of(self.group)

    def inputs(self, tokens: int, width: int, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
        """The x of every rank, the residual and the weight, the same on all ranks."""
        draw = torch.Generator(self.device).manual_seed(seed)

        def rand(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=draw, device=self.device)
            return x.to(torch.bfloat16)

        return [rand(tokens, width) for _ in range(self.ranks)], rand(tokens, width), rand(width)

    def check(self, width: int) -> None:
        """Raises AssertionError for wrong results, and for ranks with different bits."""
        from atomc.kernels.triton.collective import allreduce

        graphs = []
        for tokens in CHECKED:
            xs, residual, weight = self.inputs(tokens, width)
            x, own = xs[self.rank].clone(), (residual.clone(), weight)

            def call(x: Tensor = x, own: tuple[Tensor, Tensor] = own) -> tuple[Tensor, Tensor]:
                return allreduce.all_reduce_rms_norm(x, *own, EPS, self.peers)

            call()
            graphs.append((tokens, x, own, *captured(call)))
        for number in range(200):
            tokens, x, (residual, weight), graph, (y, total) = graphs[number * 7 % 13 % len(graphs)]
            xs, given, _ = self.inputs(tokens, width, number)
            x.copy_(xs[self.rank])
            residual.copy_(given)
            graph.replay()
            summed = sum(each.float() for each in xs).bfloat16()
            wanted, total_wanted = ops.add_rms_norm.reference(summed, given, weight, EPS)
            assert torch.equal(total, total_wanted), f"step {number}, {tokens} rows: wrong sum"
            torch.testing.assert_close(y, wanted, rtol=2**-6, atol=1e-5)
            if number % 20 == 0:
                all_y = [torch.empty_like(y) for _ in range(self.ranks)]
                distributed.all_gather(all_y, y.contiguous())
                for other in all_y:
                    same = torch.equal(other.view(torch.int16), y.view(torch.int16))
                    assert same, f"step {number}: ranks have different bits"
        torch.cuda.synchronize()

    def times(self, tokens: int, width: int, warps: int | None) -> dict[str, float | None]:
        from atomc.kernels.triton.collective import allreduce, collective

        if warps is not None:
            allreduce.warps_for = lambda block: warps  # type: ignore[assignment]
        xs, residual, weight = self.inputs(tokens, width)
        x, zeros = xs[self.rank], torch.zeros_like(xs[0])

        def two_launches() -> None:
            allreduce.push(x, self.peers)
            allreduce.all_reduce_rms_norm(x, residual, weight, EPS, self.peers, pushes=False)

        calls: dict[str, Callable[[], object]] = {
            "NCCL, norm": lambda: collective.allreduce_add_rms_norm(
                x, residual, weight, EPS, self.group
            ),
            "NCCL": lambda: distributed.all_reduce(zeros),
        }
        if tokens <= self.peers.rows and width * 2 <= peer_memory.ROW_BYTES:
            calls = {
                "one launch": lambda: allreduce.all_reduce_rms_norm(
                    x, residual, weight, EPS, self.peers
                ),
                "two launches": two_launches,
                **calls,
            }
        return {name: self._time(call) for name, call in calls.items()}

    def _time(self, call: Callable[[], object]) -> float:
        """us, of the slowest rank."""

        def repeated() -> None:
            for _ in range(CALLS):
                call()

        call()
        graph, _ = captured(repeated)
        found = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3 / CALLS)
        median = torch.tensor(statistics.median(found), device=self.device)
        distributed.all_reduce(median, distributed.ReduceOp.MAX)
        return median.item()


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def run_rank(arguments: argparse.Namespace) -> None:
    why = kernels.load("triton")
    assert why is None, why
    rank = Rank(arguments.rank, arguments.ranks, arguments.store)
    first = rank.rank == 0
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "ranks": rank.ranks,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [],
    }
    for width in arguments.width:
        rank.check(width)
        if first:
            print(f"width {width}: 200 replays of {len(CHECKED)} graphs are right", flush=True)
            print(f"{'tokens':>6} {'warps':>5}", *(f"{n:>13}" for n in NAMES), flush=True)
        for warps in arguments.warps or [None]:
            for tokens in arguments.tokens:
                found = rank.times(tokens, width, warps)
                row = {"tokens": tokens, "width": width, "warps": warps, "us": found}
                report["rows"].append(row)
                if first:
                    cells = (f"{found[n]:13.2f}" if n in found else " " * 13 for n in NAMES)
                    print(f"{tokens:6} {warps or '':>5}", *cells, flush=True)
    if first and arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    torch.cuda.synchronize()
    os._exit(0)  # graphs hold communicators, whose destruction waits


NAMES = ("one launch", "two launches", "NCCL, norm", "NCCL")


def start_ranks(arguments: argparse.Namespace) -> int:
    """The exit status: that of the first rank that fails, or 124 after the limit."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--store", f"{folder}/store", "--rank"]
        environment = {
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_DEBUG": "WARN",
            **os.environ,
        }
        running = [
            subprocess.Popen([*command, str(rank)], env=environment)
            for rank in range(arguments.ranks)
        ]
        until = time.monotonic() + arguments.limit
        try:
            while any(process.poll() is None for process in running):
                if failed := [process for process in running if process.poll()]:
                    time.sleep(1.0)  # for the messages of the others
                    return failed[0].returncode
                if time.monotonic() > until:
                    print(f"no end after {arguments.limit} s: the ranks are killed", flush=True)
                    return 124
                time.sleep(0.05)
            return max(process.returncode for process in running)
        finally:
            for process in running:
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, nargs="+", default=[4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument(
        "--warps", type=int, nargs="+", help="of the one kernel, instead of its own"
    )
    parser.add_argument("--limit", type=float, default=110.0, help="seconds, then all is killed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None:
        if torch.cuda.device_count() < arguments.ranks:
            sys.exit(
                f"{arguments.ranks} ranks need {arguments.ranks} GPUs; there are "
                f"{torch.cuda.device_count()}"
            )
        sys.exit(start_ranks(arguments))
    try:
        run_rank(arguments)
    except BaseException as error:
        print(f"rank {arguments.rank}: {type(error).__name__}: {error}", flush=True)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a kernel may wait for a peer


if __name__ == "__main__":
    main()
