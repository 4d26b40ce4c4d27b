"""Parts of the modular kernel that send: two processes with some of the experts each get what one
process with all of them computes.
"""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import moe_ranks
import pytest
import torch
from moe_ranks import OPS, RANKS, Case

from atomc.kernels.moe.combinations.reference import experts_reference

pytestmark = pytest.mark.xdist_group("moe_ranks")
STANDARD = ("all_to_all", "mori")
BATCHED = ("batched_all_to_all",)
PARTS = [(name, "reference") for name in STANDARD] + [(name, "naive_batched") for name in BATCHED]
TOKENS = {"even": (5, 5), "uneven": (2, 9), "none here": (0, 7), "none there": (4, 0), "no": (0, 0)}
CASES = [
    *(Case(*part, tokens=tokens) for part in PARTS for tokens in TOKENS.values()),
    *(Case(*part, scheme, (3, 6)) for part in PARTS for scheme in ("fp8", "fp8_block")),
    *(Case(*part, "int8", (3, 6)) for part in PARTS if part[0] != "mori"),
    *(Case(*part, tokens=(3, 4), experts_of_ranks="halves") for part in PARTS),
    *(Case(name, "reference", tokens=(3, 4), experts_of_ranks="unequal") for name in STANDARD),
    # All tokens travel to one rank; one rank sends nothing.
    *(Case(*part, tokens=(6, 2), chosen=(1, 3)) for part in PARTS),
    *(Case(*part, tokens=(0, 5), chosen=(0, 2)) for part in PARTS),
    *(Case(*part, tokens=(3, 4), shared=True) for part in PARTS),
    *(Case(*part, tokens=(3, 7), dtype=torch.bfloat16) for part in PARTS),
    *(Case(name, "grouped", tokens=(1, 8)) for name in STANDARD),
    *(Case(name, "grouped", tokens=(0, 8), chunk_rows=3) for name in STANDARD),
    *(Case(name, "triton", tokens=(1, 6)) for name in STANDARD),
    *(Case(name, "triton_batched", tokens=(1, 8)) for name in BATCHED),
    # As the graph calls them: ranks have equal numbers of tokens.
    Case(OPS, "reference"),
    Case(OPS, "reference", tokens=(0, 0)),
    Case(OPS, "reference", dtype=torch.bfloat16),
    Case(OPS, "reference", experts_of_ranks="unequal"),
    *(Case(name, "triton_batched", "fp8", tokens=(4, 3)) for name in BATCHED),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both processes wrote."""
    made = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.get_context("spawn")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    ranks = [
        context.Process(target=moe_ranks.run, args=(rank, made, CASES, interpreted), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        process.kill()  # if it still waits for the other one
    return made


def read(path: Path) -> Any:
    assert path.exists(), "the process ended before this case, or still runs it"
    return torch.load(path)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_gets_what_one_process_computes_for_its_tokens(case: Case, folder: Path) -> None:
    given = moe_ranks.inputs(case)
    codes, scale = given.config.scheme.quantize(given.x)
    whole = experts_reference(
        codes, scale, given.ids, given.weights, given.of_experts, given.config, case.dtype
    )
    if case.shared:
        whole = whole + given.x * 2
    size = whole.float().square().mean().sqrt()
    quantizes_other_sums = case.experts == "triton_batched" and case.scheme != "none"
    tolerance = 1e-2 if quantizes_other_sums else TOLERANCE[case.dtype]
    for rank in range(RANKS):
        out = read(folder / f"{CASES.index(case)}-{rank}.pt")
        assert not isinstance(out, str), out
        expected = whole[given.of(case, rank)]
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        if len(out):
            error = (out.float() - expected.float()).square().mean().sqrt()
            assert error <= tolerance * size, f"rank {rank}: error {error:.3g} of {size:.3g}"


@pytest.mark.parametrize("rank", range(RANKS))
def test_expert_maps_that_a_part_cannot_use_are_refused_on_each_rank(
    rank: int, folder: Path
) -> None:
    assert read(folder / f"refused-{rank}.pt") == {
        "unequal": "batched_all_to_all sends the same number of rows to each rank, which have "
        "[1, 5] experts: use all_to_all",
        "twice": "all_to_all: expert 0 is on 2 ranks by their expert maps; each expert has to be "
        "on one",
    }
