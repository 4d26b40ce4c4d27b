"""MORI: which calls its kernels refuse, and errors of the part that sends by it. Values are those of tests/kernels/moe/test_moe_modular.py and, by two
processes, of tests/kernels/moe/test_moe_across_processes.py, over a stand-in.
"""

import sys
from dataclasses import replace
from typing import Any

import mori_stand_in
import pytest
import torch
from kernel_cases.rows import one_process_group

from atomc import kernels, ops
from atomc.kernels.moe import ExpertWeights, ModularExperts, Mori, Reference, Unquantized
from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform

EXPERTS = torch.arange(4, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _a_process_group() -> None:
    one_process_group()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    mori_stand_in.install(monkeypatch)


def call(moe: ModularExperts, tokens: int, dtype: torch.dtype, width: int = 8) -> torch.Tensor:
    w13, w2 = torch.zeros(4, 12, width, dtype=dtype), torch.zeros(4, width, 6, dtype=dtype)
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, 2, dtype=dtype)
    return moe(x, ids, weights, ExpertWeights(w13, w2))


def test_without_the_library_the_error_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"does not connect group '\w+': .* pip install amd-mori"):
        Mori(EXPERTS, max_tokens_per_rank=4)


def test_a_dtype_that_it_does_not_send_is_refused(library: None) -> None:
    moe = ModularExperts(Mori(EXPERTS, max_tokens_per_rank=4), Reference())
    with pytest.raises(ValueError, match=r"mori sends fp32, bf16 and fp8, not torch\.float16"):
        call(moe, 3, torch.float16)


def test_more_tokens_than_the_buffers_have_are_refused(library: None) -> None:
    moe = ModularExperts(Mori(EXPERTS, max_tokens_per_rank=4), Reference())
    with pytest.raises(ValueError, match="5 tokens exceed the max_tokens_per_rank=4 of mori"):
        call(moe, 5, torch.float32)


def test_buffers_are_made_once_for_rows_of_a_kind(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Mori(EXPERTS, max_tokens_per_rank=4)
    made = []

    def operator(config: mori_stand_in.EpDispatchCombineConfig) -> Any:
        made.append((config.data_type, config.hidden_dim))
        return mori_stand_in.EpDispatchCombineOp(config)

    monkeypatch.setattr(sys.modules["mori.ops"], "EpDispatchCombineOp", operator)
    moe = ModularExperts(part, Reference())
    calls = ((3, 8, torch.float32), (4, 8, torch.float32), (2, 16, torch.bfloat16))
    for tokens, width, dtype in calls:
        assert call(moe, tokens, dtype, width).shape == (tokens, width)
    assert made == [(torch.float32, 8), (torch.bfloat16, 16)]


def test_rows_that_nobody_sent_have_no_expert(library: None) -> None:
    part = Mori(EXPERTS, max_tokens_per_rank=4)
    x, ids = torch.randn(3, 8), torch.tensor([[0, 3], [2, 1], [7, 3]], dtype=torch.int32)
    given = part.prepare(x, None, ids, torch.rand(3, 2), 4, Unquantized())
    with pytest.raises(RuntimeError, match="before those sent last were combined"):
        part.prepare(x, None, ids, torch.rand(3, 2), 4, Unquantized())
    assert given.ids.tolist() == [[4, 3], [2, 1], [0, 3], [-1, -1]]  # the last token first
    assert part.expert_map is not None and part.expert_map.tolist() == [0, 1, 2, 3, -1]
    torch.testing.assert_close(given.x[:3], x.flip(0))


def test_a_result_is_kept_when_the_next_call_writes_the_same_memory(
    library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Mori(EXPERTS, max_tokens_per_rank=4)
    kept: list[torch.Tensor] = []
    combine = mori_stand_in.EpDispatchCombineOp.combine

    def combined(*given: Any) -> tuple[torch.Tensor, None]:
        kept.append(combine(*given)[0])
        return kept[-1], None

    monkeypatch.setattr(mori_stand_in.EpDispatchCombineOp, "combine", combined)
    out = call(ModularExperts(part, Reference()), 3, torch.float32)
    kept[0].fill_(7.0)
    assert (out == 0).all()


def mori_kernel(op: ops.Op) -> Kernel:
    assert kernels.load("mori") is None
    return next(kernel for kernel in op.kernels if kernel.provider == "mori")


GFX950 = Platform.named("gfx950")
HERE = replace(GFX950, here=True, peer_groups=(("connected", ""), ("apart", "on two hosts")))
SENT: dict[str, Any] = {
    "x": torch.zeros(3, 8, dtype=torch.bfloat16),
    "ids": torch.zeros(3, 2, dtype=torch.int32),
    "weights": torch.zeros(3, 2),
    "places": torch.zeros(2, 4, dtype=torch.int64),
    "nowhere": 2,
    "ranks": 2,
    "process_group": "connected",
}
RESULTS = {
    "partial": torch.zeros(6, 8, dtype=torch.bfloat16),
    "ids": torch.zeros(6, 2, dtype=torch.int64),
    "ranks": 2,
    "process_group": "connected",
}
CODES = torch.zeros(3, 16, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("differs", "platform", "why"),
    [
        ({}, GFX950, None),
        ({}, HERE, None),
        ({"x": CODES, "x_scale": torch.ones(3, 1)}, HERE, None),
        ({}, Platform.named("h200"), "MORI's kernels are used on gfx942 and gfx950"),
        ({"ranks": 16}, GFX950, "16 processes: MORI's kernels are used for up to 8"),
        ({"process_group": "apart"}, HERE, "does not connect group 'apart': on two hosts"),
        ({"process_group": "other"}, HERE, "does not connect group 'other': it was not asked"),
        ({"x": torch.zeros(3, 8)}, GFX950, "x is torch.float32"),
        ({"x": CODES, "x_scale": torch.ones(3, 1).half()}, GFX950, "x_scale is torch.float16"),
        ({"x": SENT["x"][:, :4]}, GFX950, "rows of 8 bytes are not a multiple of 16"),
        ({"ids": torch.zeros(3, 65)}, GFX950, "choices of 65 exceed the limit of 64"),
    ],
)
def test_tokens_that_it_cannot_send_are_refused(
    differs: dict[str, Any], platform: Platform, why: str | None
) -> None:
    reason = refusal(mori_kernel(ops.dispatch_tokens), platform, SENT | differs)
    assert (reason is None) == (why is None)
    assert reason is None or str(why) in reason.text


def test_results_that_it_cannot_add_are_refused() -> None:
    kernel = mori_kernel(ops.combine_tokens)
    assert refusal(kernel, HERE, RESULTS) is None
    reason = refusal(kernel, HERE, RESULTS | {"partial": torch.zeros(6, 8)})
    assert reason is not None and "partial is torch.float32" in reason.text
    reason = refusal(kernel, HERE, RESULTS | {"process_group": "apart"})
    assert reason is not None and "on two hosts" in reason.text
