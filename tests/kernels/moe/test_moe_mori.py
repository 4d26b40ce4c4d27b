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
from torch.utils._python_dispatch import TorchDispatchMode

from atomc import kernels, ops
from atomc.kernels.moe import ExpertWeights, ModularExperts, Mori, Reference, Unquantized
from atomc.kernels.mori import exchange
from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform
from atomc.torch_compat import peer_memory
from atomc.torch_compat.process_groups import process_group

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


@pytest.mark.parametrize(
    ("others", "fails", "why"),
    [
        ((None, "1", "here"), False, ""),
        (("not installed", "1", "here"), False, "not installed"),
        ((None, "2", "here"), False, "its processes have versions 1, 2 of MORI"),
        ((None, "1", "there"), False, "its processes run on several hosts"),
        ((None, "1", "here"), True, "RuntimeError: no memory"),
    ],
)
def test_either_all_processes_are_connected_or_all_know_why_not(
    library: None,
    monkeypatch: pytest.MonkeyPatch,
    others: tuple[str | None, str, str],
    fails: bool,
    why: str,
) -> None:
    def gathered(value: Any, group: Any) -> list[Any]:
        """Of this process, and of another one that has the same but for these."""
        return [(None, "1", "here"), others] if isinstance(value, tuple) else [value] * 2

    def failing(*arguments: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(exchange, "gathered", gathered)
    if fails:
        monkeypatch.setattr(sys.modules["mori.shmem"], "shmem_init_attr", failing)
    group = process_group(one_process_group())
    exchange.connect(group)
    assert dict(peer_memory.reasons())[group.group_name] == why
    assert (group.group_name in exchange._exchanges) == (not why)
    peer_memory.forget()


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


class Operator:
    """Of the only process: it gets what it sends."""

    def __init__(self, config: Any) -> None:
        self.used = torch.zeros(1, dtype=torch.int32)

    def dispatch(self, *sent: Any) -> tuple[Any, ...]:
        self.used.fill_(len(sent[0]))
        return *sent, self.used

    def combine(self, results: torch.Tensor, *others: Any) -> tuple[torch.Tensor, None]:
        return results, None


class HostReads(TorchDispatchMode):
    """Those of numbers on the device, for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_the_host(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    group = process_group(one_process_group())
    exchange.connect(group)
    monkeypatch.setattr(sys.modules["mori.ops"], "EpDispatchCombineOp", Operator)
    ids = torch.tensor([[1, 0], [2, 9], [3, 1]])
    places = torch.tensor([[1, 0, 2, 2], [1, 0, 3, 3]])
    calls = SENT | {"ids": ids, "places": places, "ranks": 1, "process_group": group.group_name}
    with HostReads() as reads:
        _, rows, *_ = mori_kernel(ops.dispatch_tokens).function(**calls)
        mori_kernel(ops.combine_tokens).function(SENT["x"], rows, 1, group.group_name)
    assert not reads.names
    assert not mori_kernel(ops.dispatch_tokens).syncs
    assert rows.tolist() == [[0, 1], [3, 3], [3, 0]]
    peer_memory.forget()
