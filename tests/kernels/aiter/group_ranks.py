"""Ranks that join AITER's groups, sum over them, capture sums, leave, join again, and join without
AITER, for test_aiter_groups.py: each leaves what it saw in a file.
"""

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import stand_ins
import torch
from aiter_cases import KERNELS
from stand_ins.collectives import GROUPS, PEERS, IPCBufferPool
from torch import distributed

from atomc.ops.op import refusal
from atomc.parallel.process_group import Place
from atomc.platform import Platform
from atomc.replay.cudagraphs import Pool
from atomc.runtime.config import EngineConfig
from atomc.runtime.ranks import process_group
from atomc.runtime.ranks.process_group import connect_store, create_store

HERE = replace(Platform.named("gfx950"), here=True)
CPU = torch.device("cpu")
EPS = 1e-6
WIDTH = 512
SCHEMES = ("fp8_per_token", "fp8_group", "mxfp4")


def operands(rank: int) -> dict[str, torch.Tensor]:
    """Those of a sum with its norm: x differs between ranks, the others do not."""
    of_all, of_rank = (torch.Generator().manual_seed(seed) for seed in (0, 1 + rank))
    return {
        "x": torch.randn(3, WIDTH, generator=of_rank).bfloat16(),
        "residual": torch.randn(3, WIDTH, generator=of_all).bfloat16(),
        "weight": torch.randn(WIDTH, generator=of_all).bfloat16(),
    }


def summed(group: str, rank: int) -> dict[str, Any]:
    """Results of AITER's kernels over this group, or why they refuse it."""
    tensors = operands(rank)
    norm = {**tensors, "eps": EPS, "style": "before", "process_group": group}
    calls = {
        "collective.all_reduce": {"x": tensors["x"], "process_group": group},
        "collective.all_gather": {"x": tensors["x"], "ranks": 2, "process_group": group},
        "collective.allreduce_add_rms_norm": norm,
    } | {
        f"collective_quant.allreduce_add_rms_norm_quant, {scheme}": norm
        | {
            "scheme": scheme,
            "scale": None,
            "dtype": torch.float8_e4m3fn,
            "group": 128,
            "column_major": True,
            "rounding": "even",
            "keep": True,
        }
        for scheme in SCHEMES
    }
    results: dict[str, Any] = {}
    for name, arguments in calls.items():
        kernel = KERNELS[name.partition(",")[0]]
        reason = refusal(kernel, HERE, arguments)
        results[name] = reason.text if reason else kernel.function(**arguments)
    return results


class Stream:
    """Stands for torch.cuda.Stream."""

    current: ClassVar["Stream"]

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: "Stream") -> None:
        pass


class Graph:
    """Stands for torch.cuda.CUDAGraph: a captured call runs, once."""

    captures = False

    def capture_begin(self, **how: Any) -> None:
        Graph.captures = True

    def capture_end(self) -> None:
        Graph.captures = False


@contextlib.contextmanager
def current(stream: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@contextlib.contextmanager
def played_device() -> Iterator[None]:
    """What a capture asks of torch.cuda."""
    Stream.current = Stream()
    with mock.patch.multiple(
        torch.cuda,
        CUDAGraph=Graph,
        Stream=Stream,
        stream=current,
        current_stream=lambda: Stream.current,
        device=contextlib.nullcontext,
        graph_pool_handle=lambda: (0, 0),
        memory_reserved=lambda device: 0,
        is_current_stream_capturing=lambda: Graph.captures,
    ):
        yield


def captured(place: Place, rank: int) -> dict[str, Any]:
    """Results of a warm-up and of its capture; what a capture that raises says; and how many
    tensors the ranks registered for each.
    """
    assert place.tp is not None
    group, results = place.tp.group, list[dict[str, Any]]()

    def total() -> torch.Tensor:
        kernel = KERNELS["collective.all_reduce"]
        summed: torch.Tensor = kernel.function(x=operands(rank)["x"], process_group=group)
        return summed

    def fail() -> None:
        total()
        raise RuntimeError("this cannot be captured")

    PEERS.registered.clear()
    with played_device():
        pool = Pool(CPU, place.capturing)
        # AITER has no warm-up of the quantizing sum: it is not captured here.
        pool.capture(lambda: results.append({"all_reduce": total()}))
        said = ""
        try:
            pool.capture(fail, warm_up=False)
        except RuntimeError as error:
            said = str(error)
        pool.capture(lambda: results.append(summed(group, rank)), warm_up=False)
    return {"results": results, "said": said, "registered": [*PEERS.registered]}


def run(rank: int, tp: int, pp: int, folder: Path) -> None:
    torch.set_num_threads(1)
    seen: list[Any] = []
    ports = distributed.FileStore(str(folder / "ports"), tp * pp)
    if rank == 0:
        IPCBufferPool._pool_seq = 5  # it was in another group before, with other processes
    with stand_ins.installed("gfx950"), mock.patch.object(process_group, "_on_rocm", lambda: True):
        for number, providers in enumerate(((), (), ("triton",))):
            config = EngineConfig(device="cpu", tp=tp, pp=pp, options={"providers": providers})
            try:
                if rank == 0:
                    store = create_store(tp * pp, None)
                    ports.set(f"{number}", f"{store.port}")
                else:
                    port = int(ports.get(f"{number}"))
                    store = connect_store(process_group.LOCALHOST, port, tp * pp)
                place = process_group.join(store, rank, CPU, config)
                assert place.tp is not None
                results = summed(place.tp.group, rank)
                captures = None if GROUPS == {} else captured(place, rank)
                seen.append((place, results, captures, {*GROUPS}))
                distributed.barrier()
                process_group.leave()
            except Exception:
                seen.append(traceback.format_exc())
    torch.save(seen, folder / f"{rank}.pt")
