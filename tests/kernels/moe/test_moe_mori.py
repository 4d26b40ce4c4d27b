"""The adapter of MORI's all-to-all: errors. Values are those of tests/kernels/moe/test_moe_modular.py and, by two
processes, of tests/kernels/moe/test_moe_across_processes.py, over a stand-in.
"""

import sys
from typing import Any

import mori_stand_in
import pytest
import torch
from kernel_cases.rows import one_process_group

from atomc.kernels.moe import ExpertWeights, ModularExperts, Mori, Reference, Unquantized

EXPERTS = torch.arange(4, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _a_process_group() -> None:
    one_process_group()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in mori_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def call(moe: ModularExperts, tokens: int, dtype: torch.dtype, width: int = 8) -> torch.Tensor:
    w13, w2 = torch.zeros(4, 12, width, dtype=dtype), torch.zeros(4, width, 6, dtype=dtype)
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, 2, dtype=dtype)
    return moe(x, ids, weights, ExpertWeights(w13, w2))


def test_without_the_library_the_error_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mori", "mori.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install amd-mori\); all_to_all sends by torch"):
        Mori(EXPERTS, max_tokens_per_rank=4)


def test_a_dtype_that_it_does_not_send_is_refused(library: None) -> None:
    moe = ModularExperts(Mori(EXPERTS, max_tokens_per_rank=4), Reference())
    with pytest.raises(ValueError, match=r"mori sends fp32, bf16 and fp8, not torch\.float16"):
        call(moe, 3, torch.float16)


def test_more_tokens_than_the_buffers_have_are_refused(library: None) -> None:
    moe = ModularExperts(Mori(EXPERTS, max_tokens_per_rank=4), Reference())
    with pytest.raises(ValueError, match="5 tokens exceed the max_tokens_per_rank=4 of mori"):
        call(moe, 5, torch.float32)


def test_buffers_are_made_once_for_rows_of_a_kind(library: None) -> None:
    part = Mori(EXPERTS, max_tokens_per_rank=4)
    made = []

    def operator(config: mori_stand_in.EpDispatchCombineConfig) -> Any:
        made.append((config.data_type, config.hidden_dim))
        return mori_stand_in.EpDispatchCombineOp(config)

    part.library.EpDispatchCombineOp = operator  # type: ignore[attr-defined]
    moe = ModularExperts(part, Reference())
    calls = ((3, 8, torch.float32), (4, 8, torch.float32), (2, 16, torch.bfloat16))
    for tokens, width, dtype in calls:
        assert call(moe, tokens, dtype, width).shape == (tokens, width)
    assert made == [(torch.float32, 8), (torch.bfloat16, 16)]


def test_rows_that_nobody_sent_have_no_expert(library: None) -> None:
    part = Mori(EXPERTS, max_tokens_per_rank=4)
    x, ids = torch.randn(3, 8), torch.tensor([[0, 3], [2, 1], [7, 3]], dtype=torch.int32)
    given = part.prepare(x, None, ids, torch.rand(3, 2), 4, Unquantized())
    assert given.ids.tolist() == [[4, 3], [2, 1], [0, 3], [-1, -1]]  # the last token first
    assert part.expert_map is not None and part.expert_map.tolist() == [0, 1, 2, 3, -1]
    torch.testing.assert_close(given.x[:3], x.flip(0))


def test_a_result_is_kept_when_the_next_call_writes_the_same_memory(library: None) -> None:
    part = Mori(EXPERTS, max_tokens_per_rank=4)
    kept: list[torch.Tensor] = []
    operator = part._operator(torch.zeros(1, 8), None, 2)
    combine = operator.combine

    def combined(*given: torch.Tensor) -> tuple[torch.Tensor, None]:
        kept.append(combine(*given)[0])
        return kept[-1], None

    operator.combine = combined
    out = call(ModularExperts(part, Reference()), 3, torch.float32)
    kept[0].fill_(7.0)
    assert (out == 0).all()
