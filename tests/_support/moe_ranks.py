"""Two processes with half of the experts each, for tests/kernels/moe/test_moe_across_processes.py: every case
runs on both, and leaves its result in a file.
"""

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import mori_stand_in
import pytest
import torch
from bench_script import loaded
from kernel_cases import experts
from kernel_cases.draw import Draw
from torch import Tensor, distributed

from atomc import ops
from atomc.kernels.moe import (
    SCHEMES,
    AllToAll,
    BatchedAllToAll,
    ExpertsConfig,
    ExpertWeights,
    ModularExperts,
    Mori,
    PrepareFinalize,
)

EXPERTS = loaded("moe_parts").EXPERTS
RANKS = 2
OPS = "the ops"
MOST_TOKENS = 9
# Row of an expert in the weights of each rank: in turn, by halves, and unequal numbers.
MAPS = {
    "in turn": [[0, -1, 1, -1, 2, -1], [-1, 0, -1, 1, -1, 2]],
    "halves": [[0, 1, 2, -1, -1, -1], [-1, -1, -1, 0, 1, 2]],
    "unequal": [[-1, 0, -1, -1, -1, -1], [4, -1, 0, 1, 2, 3]],
}
PREPARE: dict[str, Callable[[Tensor], PrepareFinalize]] = {
    "all_to_all": AllToAll,
    "mori": lambda given: Mori(given, max_tokens_per_rank=MOST_TOKENS),
    "batched_all_to_all": lambda given: BatchedAllToAll(given, max_tokens_per_rank=MOST_TOKENS),
}


class Case(NamedTuple):
    """tokens  of each rank
    chosen  the experts that tokens may choose, or None: all
    """

    prepare: str
    experts: str
    scheme: str = "none"
    tokens: tuple[int, int] = (5, 5)
    experts_of_ranks: str = "in turn"
    dtype: torch.dtype = torch.float32
    chunk_rows: int | None = None
    chosen: tuple[int, ...] | None = None
    shared: bool = False

    def __str__(self) -> str:
        return " ".join(str(value) for value in self if value is not None).replace("torch.", "")


class Inputs(NamedTuple):
    """Of all ranks: x [T, H], ids and weights [T, k] int32 and fp32, and the weights of all
    experts.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    of_experts: ExpertWeights
    config: ExpertsConfig

    def of(self, case: Case, rank: int) -> slice:
        """The tokens of a rank."""
        start = sum(case.tokens[:rank])
        return slice(start, start + case.tokens[rank])


def inputs(case: Case) -> Inputs:
    """The same on all ranks."""
    make: dict[str, Callable[..., dict[str, Any]]] = {
        "none": experts.full,
        "fp8": experts.fp8,
        "fp8_block": experts.fp8_block,
        "int8": experts.int8,
    }
    made = make[case.scheme](Draw(case.dtype), tokens=sum(case.tokens), bias=True)
    if case.chosen is not None:
        made["ids"] = torch.tensor(case.chosen, dtype=torch.int32)[made["ids"] % len(case.chosen)]
    x = Draw(case.dtype).normal(*made["x"].shape)
    names = [name for name in made if name in ExpertWeights.__annotations__]
    of_experts = ExpertWeights(**{name: made[name] for name in names})
    config = ExpertsConfig(SCHEMES[case.scheme])
    return Inputs(x, made["ids"], made["weights"], of_experts, config)


def of_ops(case: Case, rank: int, given: Inputs, held: ExpertWeights) -> Tensor:
    """By the references of the ops that send, and of experts."""
    maps = torch.tensor(MAPS[case.experts_of_ranks])
    nowhere = len(maps[0])
    rows = maps[rank].masked_fill(maps[rank] < 0, nowhere)
    group = distributed.group.WORLD
    assert group is not None
    own = given.of(case, rank)
    x, ids, weights, _ = ops.dispatch_tokens.reference(
        given.x[own],
        given.ids[own],
        given.weights[own],
        torch.stack((rows, rows)),
        nowhere,
        RANKS,
        group.group_name,
    )
    results = ops.moe_experts.reference(x, ids, weights, held.w13, held.w2, held.b13, held.b2)
    return ops.combine_tokens.reference(results, ids, RANKS, group.group_name)


def result(case: Case, rank: int) -> Tensor:
    """What a rank gets for its tokens."""
    given = inputs(case)
    expert_map = torch.tensor(MAPS[case.experts_of_ranks][rank])
    held = expert_map.argsort()[-int((expert_map >= 0).sum()) :]
    stored = vars(given.of_experts).items()
    weights: dict[str, Any] = {name: None if w is None else w[held] for name, w in stored}
    of_experts = ExpertWeights(**weights)
    if case.prepare == OPS:
        return of_ops(case, rank, given, of_experts)
    own = given.of(case, rank)
    moe = ModularExperts(
        PREPARE[case.prepare](expert_map),
        EXPERTS[case.experts].part(),
        given.config,
        chunk_rows=case.chunk_rows,
    )
    x = given.x[own]
    shared = (lambda: x * 2) if case.shared else None
    return moe(x, given.ids[own], given.weights[own], of_experts, shared=shared)


def refused() -> dict[str, str]:
    """Messages of errors that all ranks have."""
    maps = torch.tensor(MAPS["unequal"][distributed.get_rank()])
    found = {}
    attempts: dict[str, Callable[[], Any]] = {
        "unequal": lambda: BatchedAllToAll(maps, max_tokens_per_rank=4),
        "twice": lambda: AllToAll(torch.arange(4)),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def run(rank: int, folder: Path, cases: list[Case], interpreted: bool) -> None:
    """Writes a file <number>-<rank>.pt with the result or the traceback of each case."""
    torch.set_num_threads(1)
    if interpreted:
        from interpreted_floats import round_to_nearest
        from interpreted_launches import patch_once_a_launch
        from memory import check_bounds

        round_to_nearest()
        check_bounds()
        patch_once_a_launch()
    mori_stand_in.install(pytest.MonkeyPatch())
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    torch.save(refused(), folder / f"refused-{rank}.pt")
    for number, case in enumerate(cases):
        try:
            out: Tensor | str = result(case, rank)
        except Exception:  # of any kind: the test of the case shows it
            out = traceback.format_exc()
        torch.save(out, folder / f"{number}-{rank}.pt")
    distributed.destroy_process_group()
