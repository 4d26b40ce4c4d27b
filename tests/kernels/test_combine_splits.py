"""The combination of attention's splits, in Triton."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from atomc.kernels.triton.attention.combine_splits import FEW_ROWS, combined

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.covering
@pytest.mark.parametrize("rows", [3, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize(("splits", "width"), [(2, 80), (5, 512), (33, 192)])
def test_splits_are_weighted_by_the_softmax_mass_of_their_keys(
    rows: int, splits: int, width: int
) -> None:
    parts = torch.randn(rows, splits, width, device=DEVICE)
    lse = 3 * torch.randn(rows, splits, device=DEVICE)
    lse[0] = lse[1, 0] = -torch.inf  # without keys
    parts[0] = parts[1, 0] = torch.nan  # not written
    weights = (lse.double() * torch.log(torch.tensor(2.0))).softmax(-1).nan_to_num(0.0)
    truth = (weights[..., None] * parts.double().nan_to_num(0.0)).sum(1)
    assert_close(combined(parts, lse, torch.float32), truth.float(), rtol=1e-5, atol=1e-5)
    assert combined(parts, lse, torch.bfloat16).dtype == torch.bfloat16
