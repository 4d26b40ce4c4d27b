"""What kernels over AITER refuse because its attention, cache writes and sums would fail, or would
compute something else.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import KERNELS, cases
from compare import compare
from kernel_cases.attention import attended
from kernel_cases.draw import Draw
from kernel_cases.rows import reducing
from kernel_cases.state import written
from stand_ins.collectives import PROCESSES
from torch import Tensor

from atomc import ops
from atomc.ops.op import Refusal, refusal
from atomc.platform import Platform

DRAW = Draw(torch.bfloat16)
HERE = replace(Platform.named("gfx950"), here=True)


def refused(name: str, given: dict[str, Any]) -> Refusal | None:
    with stand_ins.installed("gfx950"):
        return refusal(KERNELS[name], HERE, given)


def test_a_window_of_one_key_is_refused() -> None:
    assert refused("attention.attention", attended(DRAW, 33, window=2)) is None
    assert refused("attention.attention", attended(DRAW, 33, window=1)) == Refusal(
        "argument", "AITER has no kernel for a window of one key"
    )


def test_caches_with_unequal_strides_between_blocks_are_refused() -> None:
    given = written(DRAW, [range(5, 9)])
    assert refused("kv_write.kv_write", given) is None
    given["v_cache"] = torch.cat((given["v_cache"], given["v_cache"]), 1)[:, :16]
    assert refused("kv_write.kv_write", given) == Refusal(
        "layout", "the blocks of keys are further apart than those of values, or nearer"
    )


def test_the_sum_of_one_process_is_a_tensor_of_its_own() -> None:
    given = reducing(lambda draw: {"x": draw.normal(3, 8)})(DRAW)
    with stand_ins.installed("gfx950"):
        summed = KERNELS["collective.all_reduce"].function(**given)
    assert torch.equal(summed, given["x"])
    assert summed.untyped_storage().data_ptr() != given["x"].untyped_storage().data_ptr()


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both hold the same tensors."""

    def doubled(x: Tensor, group: str) -> Tensor:
        return 2 * x.contiguous()

    monkeypatch.setattr(ops.all_reduce, "reference", doubled)
    token = PROCESSES.set(2)
    yield
    PROCESSES.reset(token)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("name", ["collective.all_reduce", "collective.allreduce_add_rms_norm"])
def test_two_processes_are_summed_before_the_residual_is_added(name: str) -> None:
    taken = 0
    with stand_ins.installed("gfx950"):
        for make in cases(KERNELS[name], "gfx950").values():
            if refusal(KERNELS[name], HERE, make(DRAW)) is None:
                compare(KERNELS[name], lambda make=make: make(Draw(torch.bfloat16)), torch.bfloat16)
                taken += 1
    assert taken
