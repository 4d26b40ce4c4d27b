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
from kernel_cases.attention import attended, paged
from kernel_cases.draw import Draw
from kernel_cases.rows import reducing
from kernel_cases.state import rope_written, written
from stand_ins.collectives import PROCESSES
from torch import Tensor

from atomc import ops
from atomc.ops.op import Refusal, refusal
from atomc.platform import Platform

STATE_OPS = ("attention", "paged_attention", "kv_write", "rope_kv_write", "qk_norm_rope_kv_write")
DRAW = Draw(torch.bfloat16)
HERE = replace(Platform.named("gfx950"), here=True)


def refused(name: str, given: dict[str, Any]) -> Refusal | None:
    with stand_ins.installed("gfx950"):
        return refusal(KERNELS[name], HERE, given)


STATEFUL = [name for name, kernel in KERNELS.items() if kernel.op in STATE_OPS]


@pytest.mark.parametrize("name", STATEFUL)
def test_other_machines_are_refused_before_anything_else(name: str) -> None:
    kernel = KERNELS[name]
    for make in cases(kernel, "gfx950").values():
        given = make(Draw(torch.bfloat16, layout=kernel.layout or "paged"))
        assert refusal(kernel, Platform.named("sm90"), given) == Refusal(
            "hardware", "AITER runs on AMD GPUs"
        )


def test_a_window_of_one_key_is_refused() -> None:
    assert refused("attention.attention", attended(DRAW, 33, window=2)) is None
    assert refused("attention.attention", attended(DRAW, 33, window=1)) == Refusal(
        "argument", "AITER has no kernel for a window of one key"
    )


def test_a_window_without_a_causal_mask_is_refused() -> None:
    assert refused("attention.attention", attended(DRAW, 33, window=5, causal=False)) == Refusal(
        "argument", "AITER's window ends at the query, here later keys are seen"
    )


def test_a_rotation_in_fp32_is_refused_where_aiter_rounds_its_steps() -> None:
    given = rope_written(DRAW, cache=torch.bfloat16)
    assert refused("rope_kv_write.rope_kv_write", given) is None
    assert refused("rope_kv_write.rope_kv_write", given | {"in_fp32": True}) == Refusal(
        "argument", "AITER's kernel does not support in_fp32"
    )


def test_assembly_that_scales_by_the_width_of_a_head_gets_no_other_scale() -> None:
    name = "shuffled_attention.paged_attention"
    assert refused(name, paged(DRAW, [(1, 5)], width=128)) is None
    assert refused(name, paged(DRAW, [(1, 5)], width=128, scale=0.09)) == Refusal(
        "argument", "AITER's assembly scales by 1 / sqrt(128)"
    )
    assert refused(name, paged(DRAW, [(1, 5)], width=64)) == Refusal(
        "shape",
        "4 heads of 64 share a key head: AITER's assembly takes heads of 128, up to 16",
    )
    assert refused(name, paged(DRAW, [(1, 5)], width=128, window=4)) == Refusal(
        "argument", "AITER's assembly does not support window"
    )


def test_long_prompts_with_sinks_are_left_to_triton() -> None:
    given = paged(DRAW, [(40, 40)]) | {"sinks": DRAW.normal(8)}
    assert refused("paged_attention_triton.paged_attention", given) is None
    assert refused("paged_attention.paged_attention", given) == Refusal(
        "argument", "AITER's attention does not support sinks"
    )


def test_a_scattered_cache_is_not_gathered() -> None:
    given = paged(DRAW, [(40, 40)])
    given["k_cache"] = torch.cat((given["k_cache"], given["k_cache"]), 1)[:, :16]
    assert refused("paged_attention.paged_attention", given) == Refusal(
        "layout", "the blocks of the cache are not contiguous"
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

    def doubled(x: Tensor, process_group: str) -> Tensor:
        return 2 * x.contiguous()

    monkeypatch.setitem(vars(ops.all_reduce), "reference", doubled)
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
