"""Latent attention by two groups of four warps, whose products are in branches."""

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from torch.testing import assert_close

from atomc import ops
from atomc.kernels.triton.latent.mla_attention import LatentTiling, attend, tiling

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = ["decode", "mixed, some without new tokens", "more heads than a tile", "odd widths"]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("device", DEVICES)
def test_products_in_branches_are_those_outside(device: str, case: str, splits: int) -> None:
    on_gpu = device == "cuda"
    if torch.cuda.is_available() and not on_gpu:
        pytest.skip("Triton kernels run on a GPU")
    # A GPU has room for these tiles in 16 bits only, and the interpreter is fast with small ones.
    dtype, keys = (torch.bfloat16, 64) if on_gpu else (torch.float32, 16)
    a = CASES["mla_absorbed_attention"][case](Draw(dtype, device))
    heads = a["q"].shape[-2]
    decode = len(a["q"]) == len(a["seq_lens"])
    of_tile = -(-heads // -(-heads // 64))
    names = ("kv_cache", "query_start", "seq_lens", "block_tables", "latent", "scale")
    cut = LatentTiling(64, keys, of_tile, splits, 8, 3, decode, branches=True)
    found = attend(a["q"], cut, kv_scale=None, **{name: a[name] for name in names})
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if on_gpu else {"atol": 1e-5, "rtol": 1e-4}
    assert_close(found, ops.mla_absorbed_attention.reference(**a), **tolerance)


@pytest.mark.parametrize(("heads", "branches"), [(16, False), (32, False), (64, True), (128, True)])
def test_tiles_of_64_rows_multiply_in_branches(heads: int, branches: bool) -> None:
    cache = torch.empty(4, 16, 576, dtype=torch.bfloat16)
    assert tiling(cache.new_empty(8, heads, 576), 8, 64, cache).branches is branches
