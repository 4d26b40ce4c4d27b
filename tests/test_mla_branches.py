"""Latent attention by two groups of four warps, whose products are in branches."""

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from torch.testing import assert_close

from atomc import ops
from atomc.kernels.triton.mla_attention import LatentTiling, attend

SHAPES = ["decode", "mixed, some without new tokens", "more heads than a tile", "odd widths"]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", SHAPES)
def test_products_in_branches_are_those_outside(case: str, splits: int) -> None:
    a = CASES["mla_absorbed_attention"][case](Draw(torch.float32))
    heads = a["q"].shape[-2]
    decode = len(a["q"]) == len(a["seq_lens"])
    of_tile = -(-heads // -(-heads // 64))
    found = attend(
        a["q"],
        a["kv_cache"],
        a["query_start"],
        a["seq_lens"],
        a["block_tables"],
        a["latent"],
        a["scale"],
        LatentTiling(64, 16, of_tile, splits, 8, 1, decode, branches=True),
    )
    assert_close(found, ops.mla_absorbed_attention.reference(**a), atol=1e-5, rtol=1e-4)
