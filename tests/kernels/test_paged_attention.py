"""What the case table cannot ask of the Triton kernel: other cuts, other blocks, and lengths that
change in a graph.
"""

from itertools import product
from typing import Any

import pytest
import torch
from kernel_cases.attention import MIXED, paged
from kernel_cases.draw import Draw
from refusals import refusal_text
from torch import Tensor

from atomc import ops
from atomc.ops.state import Layout
from atomc.platform import Platform

triton = pytest.importorskip("triton")
from atomc.kernels.triton.attention import attention as kernel  # noqa: E402
from atomc.kernels.triton.attention.attention_tiles import MAX_SPLITS, Tiling, tiling  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
CPU = torch.device("cpu")  # where tiles are those of an H200
H200 = Platform.named("h200")


def close(actual: Tensor, arguments: dict[str, Any]) -> None:
    torch.testing.assert_close(
        actual, ops.paged_attention.reference(**arguments), rtol=1e-5, atol=1e-5
    )


def cut_as(cut: Tiling, arguments: dict[str, Any]) -> Tensor:
    operands = {name: value for name, value in arguments.items() if name not in ("q", "token")}
    return kernel.attend(arguments["q"], cut, **operands)


CUTS = {
    "a tile a program": Tiling(16, 32, 1, 4, 2),
    "wide tiles": Tiling(64, 32, 1, 4, 2),
    "split tiles": Tiling(16, 16, 3, 4, 2),
    "a sequence a program": Tiling(16, 32, 1, 4, 2, by_sequence=True),
    "split sequences": Tiling(32, 16, 3, 4, 2, by_sequence=True),
    "more splits than keys": Tiling(16, 16, 7, 4, 2, by_sequence=True),
}


@pytest.mark.covering
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("attributes", [{}, {"window": 6}], ids=["causal", "window"])
def test_a_cut_changes_no_result_whatever_the_sequences(
    cut: Tiling, attributes: dict[str, int]
) -> None:
    draw = Draw(torch.float32, DEVICE)
    arguments = paged(draw, MIXED, heads=(6, 2), padding=3, **attributes)
    close(cut_as(cut, arguments), arguments)
    arguments["sinks"] = draw.normal(6)
    close(cut_as(cut, arguments), arguments)


def test_a_tile_finds_its_sequence_among_more_than_one_search_reads() -> None:
    sequences = [(1, 3)] * 126 + [(7, 9), (20, 20)] + [(1, 2)] * 4 + [(0, 0)] * 130
    arguments = paged(Draw(torch.float32, DEVICE), sequences, heads=(2, 1), padding=3)
    close(cut_as(CUTS["a tile a program"], arguments), arguments)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_blocks_have_any_size(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.LAYOUTS, "paged", Layout("paged", (0, 1, 2, 3), block_size))
    arguments = paged(Draw(torch.float32, DEVICE), [(3, 150), (1, 128), (5, 20)], heads=(4, 2))
    assert arguments["k_cache"].shape[1] == block_size
    close(kernel.paged_attention(**arguments), arguments)


@pytest.mark.covering
@pytest.mark.parametrize(
    "sequences", [[(1, 150), (1, 20)], [(40, 50), (1, 70), (0, 7)]], ids=["decode", "mixed"]
)
@pytest.mark.parametrize("width", [40, 72, 96, 192, 256])
def test_heads_have_any_width_up_to_256(width: int, sequences: list[tuple[int, int]]) -> None:
    arguments = paged(Draw(torch.float16, DEVICE), sequences, heads=(3, 1), width=width)
    exact = ops.paged_attention.reference(**arguments | {"q": arguments["q"].float()})
    torch.testing.assert_close(
        kernel.paged_attention(**arguments).float(), exact, rtol=4e-3, atol=4e-3
    )


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (8, (8, 0)),
        (24, (24, 0)),
        (40, (32, 8)),
        (64, (64, 0)),
        (72, (64, 8)),
        (80, (64, 16)),
        (96, (64, 32)),
        (120, (120, 0)),
        (192, (128, 64)),
        (256, (256, 0)),
    ],
)
def test_a_width_between_powers_of_two_is_multiplied_in_two_parts(
    width: int, expected: tuple[int, int]
) -> None:
    assert kernel.split_width(width) == expected


def test_what_stands_in_a_block_table_behind_a_sequence_is_not_read() -> None:
    arguments = paged(Draw(torch.float32, DEVICE), MIXED)
    expected = kernel.paged_attention(**arguments)
    for s, length in enumerate(arguments["seq_lens"].tolist()):
        arguments["block_tables"][s, -(-length // 16) :] = 2**30
    assert torch.equal(kernel.paged_attention(**arguments), expected)


def test_strided_tables_and_larger_caches_are_read_in_place() -> None:
    arguments = paged(Draw(torch.float32, DEVICE), MIXED)
    arguments["block_tables"] = torch.cat([arguments["block_tables"]] * 2, 1)[
        :, : arguments["block_tables"].shape[1]
    ]
    both = torch.stack((arguments["k_cache"], arguments["v_cache"]), 1)
    arguments["k_cache"], arguments["v_cache"] = both.unbind(1)
    close(kernel.paged_attention(**arguments), arguments)


def test_a_tile_holds_a_group_and_a_split_some_keys() -> None:
    shapes = product(
        (1, 7, 64, 575, 8192), (1, 7, 64), (1, 2, 5, 8, 71), (1, 8), (64, 128, 256), (2, 4)
    )
    for num_rows, num_sequences, group, kv_heads, width, itemsize in shapes:
        for longest in (16, 1024, 131072):
            cut = tiling(num_rows, num_sequences, group, kv_heads, width, itemsize, longest, CPU)
            assert group <= cut.rows <= 128
            assert 1 <= cut.splits <= MAX_SPLITS
            assert (cut.splits - 1) * cut.keys < longest


def test_only_steps_of_one_token_a_sequence_leave_a_sequence_to_one_program() -> None:
    shapes = ((64, 64, 2), (64, 1, 8), (256, 256, 4))
    assert all(
        tiling(rows, rows, group, 8, 128, 2, longest, CPU).by_sequence
        for rows, longest, group in shapes
    )
    for rows in (512, 1024, 2048):  # a prompt, captured with room for 256 sequences
        assert not tiling(rows, 256, 2, 8, 128, 2, 40960, CPU).by_sequence


@pytest.mark.parametrize("sequences", [[(90, 90)], [(40, 75)]], ids=["a prompt", "a chunk"])
def test_one_sequence_alone_is_cut_by_heads_first(sequences: list[tuple[int, int]]) -> None:
    arguments = paged(Draw(torch.float32, DEVICE), sequences, heads=(6, 3), padding=5)
    close(cut_as(Tiling(16, 32, 1, 4, 2), arguments), arguments)
    close(cut_as(Tiling(16, 16, 2, 4, 2), arguments), arguments)


def refusal(**changed: Any) -> str | None:
    arguments = paged(Draw(torch.float32), [(1, 5)]) | changed
    [found] = [k for k in ops.paged_attention.kernels if k.provider == "triton"]
    return refusal_text(found, H200, arguments)


def test_a_refusal_says_what_came() -> None:
    assert refusal() is None
    assert refusal(k_scale=torch.ones(1)) == "a cache of torch.float32 does not support k_scale"
    assert refusal(q=torch.ones(1, 8, 64, dtype=torch.bfloat16)) == (
        "k_cache is torch.float32: written for torch.bfloat16 or torch.float8_e4m3fn or "
        "torch.float8_e4m3fnuz"
    )
    assert refusal(q=torch.ones(1, 258, 64)) == (
        "129 query heads share a key/value head, the limit is 128"
    )
    assert refusal(seq_lens=torch.tensor([5])) == "seq_lens is not a contiguous int32 tensor"
    assert refusal(scale=-1.0) == "the scale -1.0 is not positive"
    wide = torch.ones(2, 16, 2, 512)
    assert refusal(q=torch.ones(1, 2, 512), k_cache=wide, v_cache=wide) == (
        "heads of 512 exceed the limit of 256"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", [[(1, 300), (1, 40), (1, 17)], [(70, 300), (1, 40), (3, 17)]])
def test_a_captured_graph_serves_other_lengths(sequences: list[tuple[int, int]]) -> None:
    arguments = paged(Draw(torch.float32, "cuda"), sequences)
    kernel.paged_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.paged_attention(**arguments)
    graph.replay()
    close(out, arguments)
    arguments["seq_lens"].sub_(torch.tensor([100, 0, 2], dtype=torch.int32, device="cuda"))
    graph.replay()
    close(out, arguments)
