"""The combination of attention's splits, in Triton."""

import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("triton")

from atomc import ops
from atomc.kernels.triton.attention import decode_dense
from atomc.kernels.triton.attention.combine_splits import FEW_ROWS, combined, counters

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


@pytest.mark.parametrize("keys", [140, 500])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_last_program_of_a_row_combines_few_splits_in_each_layer(
    monkeypatch: pytest.MonkeyPatch, keys: int, batch: int
) -> None:
    q = torch.randn(batch, 1, 6, 64, device=DEVICE)
    k, v = (torch.randn(batch, keys, 2, 64, device=DEVICE) for _ in range(2))
    attend = {"q": q, "k": k, "v": v, "scale": 0.125, "causal": False}
    arrived = counters(q.device)
    by_itself = []
    monkeypatch.setattr(
        decode_dense, "combined", lambda *parts: by_itself.append(1) or combined(*parts)
    )
    layers = [decode_dense.attention(**attend, shared=arrived) for _ in range(3)]
    assert not by_itself and not arrived[0].any()
    monkeypatch.setattr(decode_dense, "COMBINED_AT_ONCE", 0)
    expected = decode_dense.attention(**attend, shared=arrived)
    assert by_itself
    assert_close(expected, ops.attention.reference(**attend), rtol=1e-4, atol=1e-5)
    for layer in layers:
        assert_close(layer, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(layer, layers[0])
