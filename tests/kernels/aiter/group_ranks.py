"""Ranks that join AITER's groups, sum over them, leave, join again, and join without
AITER, for test_aiter_groups.py: each leaves what it saw in a file.
"""

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import stand_ins
import torch
from aiter_cases import KERNELS
from stand_ins.collectives import GROUPS
from torch import distributed

from atomc.ops.op import refusal
from atomc.platform import Platform
from atomc.runtime.config import EngineConfig
from atomc.runtime.ranks import process_group

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


def run(rank: int, tp: int, pp: int, folder: Path) -> None:
    torch.set_num_threads(1)
    seen: list[Any] = []
    with stand_ins.installed("gfx950"), mock.patch.object(process_group, "_on_rocm", lambda: True):
        for number, providers in enumerate(((), (), ("triton",))):
            config = EngineConfig(device="cpu", tp=tp, pp=pp, options={"providers": providers})
            try:
                store = distributed.FileStore(str(folder / f"store{number}"), tp * pp)
                place = process_group.join(store, rank, CPU, config)
                assert place.tp is not None
                seen.append((place, summed(place.tp.group, rank), {*GROUPS}))
                distributed.barrier()
                process_group.leave()
            except Exception:
                seen.append(traceback.format_exc())
    torch.save(seen, folder / f"{rank}.pt")
