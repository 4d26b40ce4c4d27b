"""The sort of (token, choice) pairs by expert, and that experts for many tokens never wait for the
device.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from kernel_cases.prepared import with_prepared
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from atomc import ops
from atomc.kernels.torch.experts import experts_grouped_mm
from atomc.kernels.triton.experts import (
    expert_sort,
    experts_4_bits,
    experts_prefill,
    experts_prefill_packed,
    experts_prefill_scaled,
)
from atomc.kernels.triton.experts.expert_sort import Routing, most_blocks, sort_by_expert
from atomc.kernels.triton.launch.tile_table import FragmentTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # T, k, E, block
    (1, 1, 1, 16),
    (1, 2, 6, 16),
    (7, 3, 5, 16),
    (67, 2, 4, 32),
    (40, 4, 300, 16),
    (33, 4, 1, 64),
    (5, 4, 1023, 16),
]


def expected(ids: Tensor, num_experts: int, block: int) -> Routing:
    """By torch.sort."""
    expert, order = ids.flatten().long().sort(stable=True)
    pairs, blocks, owners = ids.numel(), [], []
    for e in range(num_experts):
        own = order[expert == e]
        for part in own.split(block):
            if len(part):
                padding = part.new_full((block - len(part),), pairs)
                blocks.append(torch.cat([part, padding]))
                owners.append(e)
    unused = most_blocks(pairs, num_experts, block) - len(blocks)
    filled = torch.cat([*blocks, order.new_full((unused * block,), pairs)])
    experts = torch.tensor(owners + [-1] * unused, dtype=torch.int32)
    return Routing(block, experts, filled.int())


def assert_sorted(ids: Tensor, num_experts: int, block: int) -> None:
    found = sort_by_expert(ids.to(DEVICE), num_experts, block)
    wanted = expected(ids, num_experts, block)
    assert found.block == wanted.block
    for got, want in ((found.expert, wanted.expert), (found.order, wanted.order)):
        assert got is not None and got.dtype == torch.int32
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pairs_are_sorted_as_by_torch_and_unknown_experts_are_left_out(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    tokens, k, num_experts, block = shape
    ids = torch.randint(-1, num_experts + 1, (tokens, k), dtype=dtype)
    assert_sorted(ids, num_experts, block)


def test_pairs_whose_experts_all_differ_or_are_one_fit_into_the_blocks() -> None:
    assert_sorted(torch.arange(32).view(16, 2), 32, 16)
    assert_sorted(torch.full((24, 2), 3), 8, 16)
    assert_sorted(torch.full((24, 2), 8), 8, 16)


def test_many_pairs_are_counted_by_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_sort, "MOST_COUNTED", 50)
    monkeypatch.setattr(expert_sort, "CHUNKS", ((2**63, 3),))  # of 256 pairs
    assert_sorted(torch.randint(-1, 9, (150, 4), dtype=torch.int32), 8, 16)


def test_no_pairs_need_no_blocks() -> None:
    found = sort_by_expert(torch.zeros(0, 2, dtype=torch.int32, device=DEVICE), 4, 16)
    assert found.order is not None
    assert (len(found.order), len(found.expert)) == (0, 0)


@pytest.mark.parametrize(
    "function",
    [
        experts_prefill.moe_experts,
        experts_prefill_scaled.moe_experts_fp8,
        experts_prefill_scaled.moe_experts_int8,
    ],
    ids=lambda function: function.__name__,
)
def test_pairs_in_blocks_of_their_own_get_the_bits_of_sorted_ones(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = CASES[function.__name__]["other devices' experts"](Draw(torch.bfloat16, DEVICE))
    results = []
    for apart in (True, False):
        monkeypatch.setattr(expert_sort, "are_apart", lambda *sizes, apart=apart: apart)
        results.append(function(**given))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "case",
    ["seventeen tokens", "GPT-OSS", "weight on input", "transposed", "other devices' experts"],
)
def test_grouped_products_of_pytorch_compute_what_the_op_means(case: str) -> None:
    given = CASES["moe_experts"][case](Draw(torch.bfloat16, DEVICE))
    in_fp32 = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    truth = ops.moe_experts.reference(**in_fp32)
    out = experts_grouped_mm.moe_experts(**given)
    size = truth.square().mean().sqrt()
    assert_close(out.float(), truth, rtol=0.03, atol=0.03 * float(size))


def as_read(function: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the kernel that is this function reads them."""
    kernels = ops.REGISTRY[function.__name__].kernels
    return with_prepared(next(k for k in kernels if k.function is function), given)


# One warp, two, and a group of four multiply by other instructions.
FRAGMENT_TILES = [
    FragmentTile(8, 16, 1, 4),
    FragmentTile(8, 32, 1, 4),
    FragmentTile(8, 32, 2, 4),
    FragmentTile(8, 64, 2, 4),
    FragmentTile(16, 32, 2, 4),
    FragmentTile(16, 128, 2, 3),
    FragmentTile(16, 64, 4, 4),
    FragmentTile(32, 64, 2, 4),
    FragmentTile(32, 128, 4, 3),
]


@pytest.mark.covering
@pytest.mark.parametrize("tile", FRAGMENT_TILES, ids=lambda tile: "-".join(map(str, tile)))
@pytest.mark.parametrize(
    ("function", "case"),
    [
        (experts_4_bits.moe_experts_mxfp4, "GPT-OSS"),
        pytest.param(experts_4_bits.moe_experts_mxfp4, "many tokens", marks=pytest.mark.slow),
        pytest.param(experts_4_bits.moe_experts_w4a16, "zeros", marks=pytest.mark.slow),
        (experts_4_bits.moe_experts_w4a16, "group of 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_tile_of_four_bit_weights_computes_what_the_op_means(
    function: Any, case: str, tile: FragmentTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        experts_4_bits, "EXPERTS_FRAGMENTS", SimpleNamespace(choose=lambda *sizes: tile)
    )
    given = CASES[function.__name__][case](Draw(torch.bfloat16, DEVICE))
    truth = getattr(ops, function.__name__).reference(**given).float()
    out = function(**as_read(function, given)).float()
    size = truth.square().mean().sqrt()
    assert_close(out, truth, rtol=0.03, atol=0.03 * float(size))


@pytest.mark.parametrize("block", [64, 128])
def test_of_a_block_with_few_pairs_a_quarter_is_multiplied(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks of experts with as many pairs as fill a quarter, and with one more."""
    tile = FragmentTile(block, 64, 4, 3, tall=8)
    monkeypatch.setattr(
        experts_4_bits, "EXPERTS_FRAGMENTS", SimpleNamespace(choose=lambda *sizes: tile)
    )
    quarter = block // 4
    pairs = (block + quarter, block + quarter + 1, quarter, quarter + 1)
    ids = torch.arange(4).repeat_interleave(torch.tensor(pairs))
    ids = ids[torch.randperm(len(ids))].view(-1, 2)
    cases = CASES["moe_experts_mxfp4"]
    given = cases["GPT-OSS"](Draw(torch.bfloat16, DEVICE), tokens=len(ids), experts=4, hidden=160)
    given["ids"] = ids.to(given["ids"])
    truth = ops.moe_experts_mxfp4.reference(**given).float()
    function = experts_4_bits.moe_experts_mxfp4
    out = function(**as_read(function, given)).float()
    size = truth.square().mean().sqrt()
    assert_close(out, truth, rtol=0.03, atol=0.03 * float(size))


FUNCTIONS = [
    experts_prefill.moe_experts,
    experts_prefill_scaled.moe_experts_fp8,
    experts_prefill_scaled.moe_experts_int8,
    experts_prefill_packed.moe_experts_w4a16,
    experts_prefill_packed.moe_experts_mxfp4,
    experts_grouped_mm.moe_experts,
    experts_4_bits.moe_experts_w4a16,
    experts_4_bits.moe_experts_mxfp4,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_the_host_reads_no_value_of_the_device(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors, which raise where a value is read; the launches do nothing."""
    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", lambda *args, **kwargs: None)
    arguments = as_read(function, CASES[function.__name__]["biases"](Draw(torch.bfloat16)))
    with FakeTensorMode() as mode:
        given = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        out = function(**given)
    assert (out.shape, out.dtype) == (torch.Size([5, 64]), torch.bfloat16)


@pytest.mark.gpu
def test_a_cuda_graph_of_experts_computes_the_same_bits_for_other_choices() -> None:
    given = CASES["moe_experts"]["many tokens"](Draw(torch.bfloat16, "cuda"))
    experts_prefill.moe_experts(**given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_prefill.moe_experts(**given)
    given["ids"].copy_(torch.randint_like(given["ids"], 4))
    graph.replay()
    assert torch.equal(out, experts_prefill.moe_experts(**given))


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_the_same_experts_of_many_tokens_give_the_same_bits_each_time(function: Any) -> None:
    """A missing barrier between the warps of a tile would show in a few of many thousands."""
    sizes = {"tokens": 8192, "experts": 8, "hidden": 1024, "inner": 512}
    made = CASES[function.__name__]["many tokens"](Draw(torch.bfloat16, "cuda"), **sizes)
    given = as_read(function, made)
    first = function(**given)
    for _ in range(50):
        assert torch.equal(function(**given), first)
