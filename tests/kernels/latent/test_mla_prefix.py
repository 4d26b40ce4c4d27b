"""Attention over what was cached before a step, and the products around it, leave out sequences
that have nothing there.
"""

from collections.abc import Iterator

import pytest
import torch
from kernel_cases.draw import Draw
from kernel_cases.mla import latent_projected
from memory import PoisonedMemory
from torch import Tensor
from torch.testing import assert_close

from atomc import ops

pytest.importorskip("triton")
from atomc.kernels.triton.latent import mla_prefix
from atomc.kernels.triton.latent.mla_attention import LatentTiling
from atomc.kernels.triton.linear import batched_head_linear

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"  # there in Triton's interpreter
# Exact products in fp32 have tiles of 32 rows.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}

# (new tokens, length), and what of it was there before: nothing, 1 or more.
MIXTURES = {
    "prompts": [(40, 40), (33, 33)],
    "chunks": [(40, 57), (1, 20), (33, 34)],
    "a chunk among prompts": [(70, 70), (5, 9), (40, 40), (1, 1)],
    "prompts among decodes": [(1, 9), (70, 70), (1, 17), (1, 1), (33, 33)],
    "no new tokens": [(0, 9), (40, 40), (0, 0), (3, 20), (0, 5)],
    "many sequences": [(1, 1 + i % 3) for i in range(140)] + [(2, 19)],
}


def rows_of(sequences: list[tuple[int, int]], padding: int = 0) -> Iterator[bool]:
    """Of each row, whether its sequence has tokens from before the step."""
    for new, length in sequences:
        yield from [length > new] * new
    yield from [False] * padding


def drawn(sequences: list[tuple[int, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of mla_paged_attention with three rows of no sequence, and rows_of them."""
    given = latent_projected(Draw(torch.float32, DEVICE), sequences, padding=3)
    return given, torch.tensor(list(rows_of(sequences, 3)), device=DEVICE)


@pytest.mark.parametrize("heads_each", [1, 2])
@pytest.mark.parametrize("case", MIXTURES)
def test_queries_are_projected_in_tiles_with_a_prefix_only(
    case: str, heads_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_head_linear, "_heads_each", lambda *_: heads_each)
    given, has_prefix = drawn(MIXTURES[case])
    q, of_head = given["q"], given["weight"].view(3, 44, 32)
    with PoisonedMemory():
        found = batched_head_linear.queries_to_latents(
            q, of_head, given["query_start"], given["seq_lens"], rotated=16
        )
    expected = torch.cat(
        (torch.einsum("thp,hpl->thl", q[..., :24], of_head[:, :24]), q[..., 24:]), -1
    )
    assert_close(found[has_prefix], expected[has_prefix], **CLOSE)
    for tile, some in zip(found.split(32), has_prefix.split(32), strict=True):
        assert bool(tile.isnan().all()) is not bool(some.any())


@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("case", MIXTURES)
def test_attention_over_prefixes_is_that_of_their_rows(
    case: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_prefix, "multiprocessors", lambda _: 1)
    monkeypatch.setattr(mla_prefix, "PROGRAMS", programs)
    sequences = MIXTURES[case]
    given, has_prefix = drawn(sequences)
    q = Draw(torch.float32, DEVICE).normal(len(given["q"]), 3, 48)
    names = ("kv_cache", "query_start", "seq_lens", "block_tables", "scale")
    cut = LatentTiling(16, 16, 2, 1, 4, 1, by_sequence=False)
    with PoisonedMemory():
        found, lse = mla_prefix.attend_prefixes(
            q, cut, kv_scale=None, latent=32, **{name: given[name] for name in names}
        )
    expected, expected_lse = torch.full_like(found, float("nan")), torch.full_like(lse, -torch.inf)
    start = 0
    for s, (new, length) in enumerate(sequences):
        old, rows = length - new, slice(start, start + new)
        start += new
        if old and new:
            blocks = given["block_tables"][s].long()
            keys = given["kv_cache"][blocks].flatten(0, 1)[:old]
            scores = torch.einsum("thc,kc->thk", q[rows], keys) * given["scale"]
            expected[rows] = scores.softmax(-1) @ keys[:, :32]
            expected_lse[rows] = scores.logsumexp(-1) / torch.log(torch.tensor(2.0))
    assert_close(found, expected, equal_nan=True, **CLOSE)
    assert_close(lse, expected_lse, **CLOSE)
    assert torch.equal(lse[:, 0] > -torch.inf, has_prefix)


@pytest.mark.parametrize("values", [20, 32])
@pytest.mark.parametrize("heads_each", [1, 2])
def test_results_are_weighed_where_there_are_keys(
    heads_each: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_head_linear, "_heads_each", lambda *_: heads_each)
    draw = Draw(torch.float32, DEVICE)
    tokens, heads, latent = 130, 3, 40
    new, latents = draw.normal(tokens, heads, values), draw.normal(tokens, heads, latent)
    weight = draw.normal(heads, 24 + values, latent)[:, 24:]
    new_lse, old_lse = draw.normal(tokens, heads), draw.normal(tokens, heads)
    # Rows 0 to 31 have new keys only; from then on both, except for some; the last ones have none.
    row = torch.arange(tokens, device=DEVICE)
    no_old, no_new = (row < 32) | (row % 7 == 0) | (row > 120), (row % 9 == 1) & (row > 31)
    no_new |= row > 120
    old_lse[no_old], new_lse[no_new] = -torch.inf, -torch.inf
    old = torch.einsum("thl,hvl->thv", latents, weight)
    of_old, of_new = old_lse.exp2()[..., None], new_lse.exp2()[..., None]
    expected = (of_old * old + of_new * new) / (of_old + of_new)
    expected[no_old & no_new] = 0
    latents[no_old], new[no_new] = float("nan"), float("nan")
    batched_head_linear.add_values(new, new_lse, latents, old_lse, weight)
    assert_close(new, expected, **CLOSE)


def test_values_of_tiles_without_old_keys_are_not_written() -> None:
    draw = Draw(torch.float32, DEVICE)
    new, latents = draw.normal(70, 3, 16), draw.normal(70, 3, 32)
    new_lse, old_lse = draw.normal(70, 3), draw.normal(70, 3)
    old_lse[:64] = -torch.inf
    # There are new keys for the first head, which decides. The others would get zeros.
    new_lse[:64, 1:] = -torch.inf
    new[:64] = float("nan")
    batched_head_linear.add_values(new, new_lse, latents, old_lse, draw.normal(3, 16, 32))
    assert new[:64].isnan().all() and not new[64:].isnan().any()


@pytest.mark.parametrize("case", [case for case in MIXTURES if case != "many sequences"])
def test_latent_attention_of_any_mixture_is_that_of_its_op(case: str) -> None:
    given, _ = drawn(MIXTURES[case])
    kernel = next(k for k in ops.mla_paged_attention.kernels if k.provider == "triton")
    with PoisonedMemory():
        found = kernel.function(**given)
    assert_close(found, ops.mla_paged_attention.reference(**given), **CLOSE)


def test_heads_of_a_tile_are_taken_together_when_there_are_many_programs() -> None:
    device = torch.device("cpu")  # where an H200 is assumed, of 132 multiprocessors
    each = {tiles: batched_head_linear._heads_each(tiles, 128, device) for tiles in (1, 8, 32, 64)}
    assert each == {1: 1, 8: 1, 32: 4, 64: 8}
