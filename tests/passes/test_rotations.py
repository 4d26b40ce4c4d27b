"""Stock models of transformers that rotate q and k in their own way: a `rope` for each."""

import sys
from pathlib import Path

import pytest
import torch
from rewriting import explained, rewritten
from torch import Tensor

from atomc.passes import PIPELINE

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from architectures import build

IDS = torch.tensor([[5, 9, 14, 22, 31, 7, 45, 60, 61, 18, 33, 90, 11]])
TIDY = PIPELINE[0]
[COLUMNS] = [each for each in PIPELINE if each.name == "columns_of_pairs"]
LAYERS = 2
# Each runs in one dtype per change, by turns.
STYLES = {
    "glm": "pairs",
    "cohere": "pairs",
    "ernie4_5": "pairs",
    "gptj": "pairs",
    "deepseek_v2": "gptj",
    "nanochat": "neox",
}


@pytest.mark.rotating(each_case=2)
@pytest.mark.xdist_group("rotations")
@pytest.mark.parametrize(
    ("model_type", "style", "dtype"),
    [
        pytest.param(*each, dtype, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
        for i, each in enumerate(STYLES.items())
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
    ids=str,
)
def test_q_and_k_of_every_layer_are_rotated_by_the_op(
    model_type: str, style: str, dtype: torch.dtype
) -> None:
    model = build(model_type).to(dtype)

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    tolerance = 1e-4 if dtype == torch.float32 else 2**-4
    report = explained(logits, IDS, tolerance=tolerance)
    assert report.matches["rope"] == 2 * LAYERS
    styles = {site.attrs["style"] for site in report.sites if site.rewrite == "rope"}
    assert styles == {style}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(7, 5, 2)[..., 1].exp(),
        lambda x: x.view(7, 5, 2).select(2, -1).exp(),
        lambda x: x.view(7, 5, 2).unbind(-1)[1].exp(),
    ],
)
def test_a_column_of_pairs_is_every_second_column(function) -> None:
    text = rewritten([TIDY, COLUMNS], function, torch.randn(7, 10), matches=1)
    assert text == "%0 = slice(x, -1, 1, None, 2)\n%1 = exp(%0)\nreturn %1"


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(7, 2, 5)[:, 1].exp(),
        lambda x: x.view(7, 2, 5)[..., 1].exp(),
        lambda x: x.view(14, 5)[..., 1].exp(),
        lambda x: x.view(70)[1].exp(),
        lambda x: x.view(5, 7, 2)[..., 1].exp(),
    ],
)
def test_another_column_stays(function) -> None:
    rewritten([TIDY, COLUMNS], function, torch.randn(7, 10), matches=0)
