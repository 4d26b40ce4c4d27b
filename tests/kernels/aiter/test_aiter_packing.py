"""Weights and scales in the layouts that AITER's products read."""

import pytest
import torch
from stand_ins.formats import e8m0, unshuffled_scale, unshuffled_weight
from torch.utils._python_dispatch import TorchDispatchMode

from atomc.kernels.aiter.linear.packing import relaid_scale, relaid_weight, shuffled_scale


@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (272, 1024)])
def test_a_shuffled_weight_is_read_back(shape: tuple[int, int]) -> None:
    weight = torch.randint(256, shape, dtype=torch.uint8)
    [shuffled] = relaid_weight(weight).tensors
    assert shuffled.shape == weight.shape
    assert torch.equal(unshuffled_weight(shuffled), weight)


def scales(rows: int, groups: int) -> torch.Tensor:
    return 100 + torch.randint(50, (rows, groups), dtype=torch.uint8)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 48, 64, 255, 256, 300])
def test_shuffled_scales_are_read_back(rows: int) -> None:
    given = scales(rows, 24)
    for shuffled in (shuffled_scale(given), relaid_scale(given).tensors[0]):
        assert shuffled.shape == (-(-rows // 256) * 256, 24)
        assert torch.equal(unshuffled_scale(shuffled, rows, 24), e8m0(given))


def test_scales_of_every_second_row_are_read_back() -> None:
    given = scales(66, 8)[::2]
    assert torch.equal(unshuffled_scale(shuffled_scale(given), 33, 8), e8m0(given))


class Kernels(TorchDispatchMode):
    """The ops that ran and were no view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("rows", "copies"), [(1, 1), (8, 1), (16, 1), (32, 1), (256, 1), (17, 2), (48, 2), (63, 3)]
)
def test_scales_of_activations_are_shuffled_by_one_copy_where_batches_are_padded(
    rows: int, copies: int
) -> None:
    given = scales(rows, 16)
    with Kernels() as ran:
        shuffled_scale(given)
    assert ran.names == ["new_empty"] + ["copy_"] * copies
