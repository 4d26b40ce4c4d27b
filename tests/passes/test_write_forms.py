"""Writes to the cache get the form of arguments that another kernel serves: no batch of one, and
half of tables whose halves are known to be equal.
"""

from collections.abc import Callable

import pytest
import torch
from paged_graph import paged_graph
from torch import Tensor

from atomc import ops

TOKENS, WIDTH = 5, 64
POSITIONS = torch.tensor([0, 7, 131071, 5, 1000000])
FREQUENCIES = 1e4 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
WEIGHT = torch.randn(WIDTH).bfloat16()
HALVES_SLICED = {"half": 2, "neox": 0}
Tables = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def made(positions: Tensor, inv_freq: Tensor, style: str = "neox") -> tuple[Tensor, Tensor]:
    return ops.rotary_tables(positions[:, None], inv_freq, style, 1.25, torch.bfloat16)


def by_token(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = made(positions, inv_freq)
    return cos.unsqueeze(1), sin.unsqueeze(1)


def style_after_passes(
    tables: Tables, platform: str = "gfx950", kv_cache_dtype: str = "auto", batch: bool = False
) -> str:
    """Of a write by these tables. batch: of one, which is gone where the style has changed."""

    def function(qkv: Tensor, positions: Tensor, inv_freq: Tensor, kv: Tensor) -> Tensor:
        heads = qkv.split([4 * WIDTH, 2 * WIDTH, 2 * WIDTH], -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in heads)
        cos, sin = tables(positions, inv_freq)
        if batch:
            q, k, v, cos, sin = (x[None] for x in (q, k, v, cos, sin))
        q, k = ops.qk_norm_rope(q, k, WEIGHT, WEIGHT, cos, sin, 1e-6)
        return ops.attention(q, k, v, kv, scale=WIDTH**-0.5)

    torch.manual_seed(0)
    qkv, kv = torch.randn(TOKENS, 8 * WIDTH).bfloat16(), ops.kv_state(2, WIDTH)
    inputs = qkv, POSITIONS, FREQUENCIES, kv
    traced, _ = paged_graph(function, *inputs, platform=platform, kv_cache_dtype=kv_cache_dtype)
    assert traced.error < 0.05
    [line] = [line for line in traced.text.splitlines() if "kv_write" in line]
    style = "half" if "'half'" in line else "neox"
    assert f"{style!r}" in line
    # No view is left that no kernel reads.
    assert traced.text.count("slice(") == HALVES_SLICED[style]
    assert traced.text.count(" squeeze(") == (5 if batch and style == "half" else 0)
    return style


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_the_first_half_is_enough_for_aiter(kv_cache_dtype: str, batch: bool) -> None:
    assert style_after_passes(by_token, kv_cache_dtype=kv_cache_dtype, batch=batch) == "half"


def test_a_rotation_by_one_of_equal_halves_has_the_same_bits() -> None:
    x, (cos, sin) = torch.randn(TOKENS, 3, WIDTH).bfloat16(), by_token(POSITIONS, FREQUENCIES)
    halves = (table[..., : WIDTH // 2] for table in (cos, sin))
    assert torch.equal(ops.rope(x, cos, sin, "neox"), ops.rope(x, *halves, "half"))


@pytest.mark.parametrize("batch", [False, True])
def test_a_form_stays_where_the_kernel_is_the_same(batch: bool) -> None:
    for platform in ("h200", "cpu"):
        assert style_after_passes(by_token, platform, batch=batch) == "neox"


def straddling(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the second half of a row and the first one of the next."""
    more = torch.cat((positions, positions))
    shape, steps = (TOKENS, 1, WIDTH), (WIDTH, WIDTH, 1)
    cos, sin = (table.as_strided(shape, steps, WIDTH // 2) for table in made(more, inv_freq))
    return cos, sin


def overlapping(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that are one and a half rows apart."""
    more = torch.cat((positions, positions))
    shape, steps = (TOKENS, 1, WIDTH), (WIDTH + WIDTH // 2, WIDTH, 1)
    cos, sin = (table.as_strided(shape, steps) for table in made(more, inv_freq))
    return cos, sin


def of_two_rows(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Every second column of a row and the next one."""
    more = torch.cat((positions, positions + 1))
    shape, steps = (TOKENS, 1, WIDTH), (2 * WIDTH, 2 * WIDTH, 2)
    cos, sin = (table.as_strided(shape, steps) for table in made(more, inv_freq))
    return cos, sin


def half_of_a_wider_one(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    shape, steps = (TOKENS, 1, WIDTH), (2 * WIDTH, 2 * WIDTH, 1)
    twice = torch.cat((inv_freq, 2 * inv_freq))
    cos, sin = (table.as_strided(shape, steps) for table in made(positions, twice))
    return cos, sin


def pairs(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = made(positions, inv_freq, "pairs")
    return cos.unsqueeze(1), sin.unsqueeze(1)


def one_of_half_width(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    twice = torch.cat((inv_freq, 2 * inv_freq))
    cos, sin = made(positions, twice, "half")
    return cos.unsqueeze(1), sin.unsqueeze(1)


def computed(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = by_token(positions, inv_freq)
    return cos * cos, sin


@pytest.mark.parametrize(
    "tables",
    [straddling, overlapping, of_two_rows, half_of_a_wider_one, pairs, one_of_half_width, computed],
)
def test_tables_whose_halves_may_differ_stay(tables: Tables) -> None:
    assert style_after_passes(tables) == "neox"
