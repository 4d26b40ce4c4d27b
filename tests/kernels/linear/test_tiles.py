"""Tile choices of the Triton kernels: which tile a call of each size gets on an H200, and the note
where the tiles were measured on another GPU.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import atomc
from atomc import kernels, ops
from atomc.platform import Platform

pytest.importorskip("triton")
from atomc.kernels.triton.attention import attention_tiles
from atomc.kernels.triton.launch import tile_table, tiles
from atomc.kernels.triton.rows import activation_quant, norm
from atomc.kernels.triton.rows.quant import Quantized
from atomc.kernels.triton.w4a16 import w4a16

CPU = torch.device("cpu")  # where Triton's interpreter uses the tiles of sm90
TABLES = {
    name: table for name, table in vars(tiles).items() if isinstance(table, tile_table.TileTable)
}


@pytest.mark.parametrize(
    "sizes, expected",
    [  # (rows, outputs, inputs): (rows, weight_rows, columns, parts, warps, stages)
        ((1, 1024, 1024), (1, 2, 1024, 0, 4, 1)),
        ((1, 1024, 3072), (1, 2, 2048, 0, 4, 1)),
        ((1, 2048, 1024), (1, 4, 1024, 0, 4, 1)),
        ((1, 4096, 2048), (1, 2, 1024, 0, 4, 1)),
        ((1, 151936, 4096), (1, 4, 2048, 0, 4, 1)),
        ((1, 1536, 1152), (1, 4, 128, 0, 8, 1)),
        ((1, 9216, 3072), (1, 4, 128, 0, 8, 1)),
        ((1, 1152, 6912), (1, 1, 1024, 0, 8, 1)),
        ((2, 1024, 2048), (2, 2, 1024, 0, 4, 1)),
        ((2, 2048, 1024), (8, 16, 64, 4, 4, 4)),
        ((8, 1024, 2048), (8, 16, 64, 4, 4, 6)),
        ((8, 4096, 1024), (8, 16, 64, 4, 4, 4)),
        ((8, 6144, 4096), (8, 16, 128, 4, 4, 3)),
        ((16, 1024, 2048), (16, 8, 64, 4, 4, 6)),
        ((16, 8192, 1024), (16, 16, 256, 2, 2, 3)),
        ((16, 151936, 1024), (16, 16, 256, 1, 1, 4)),
        ((9, 24576, 4096), (16, 16, 256, 2, 2, 3)),
    ],
)
def test_a_linear_of_few_rows_takes_the_measured_tile(
    sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(tiles.LINEAR.choose(CPU, *sizes, sizes[-1] % 2048)) == expected


@pytest.mark.parametrize(
    "sizes, expected",
    [  # (rows, inputs)
        ((1, 512), (1, 4, 512, 0, 4, 1)),
        ((1, 520), (1, 2, 1024, 0, 4, 1)),
        ((1, 12288), (1, 2, 2048, 0, 8, 1)),
        ((2, 4096), (8, 16, 128, 4, 4, 4)),
        ((16, 4096), (16, 16, 128, 4, 4, 3)),
    ],
)
def test_a_scaled_linear_of_few_rows_takes_the_measured_tile(
    sizes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert tuple(tiles.SCALED_LINEAR.choose(CPU, *sizes)) == expected


@pytest.mark.parametrize(
    "table, sizes, expected",
    [  # BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
        (tiles.SCALED_LINEAR_TILES, (17, 4096), (64, 32, 256, 4, 5)),
        (tiles.SCALED_LINEAR_TILES, (64, 6144), (64, 64, 256, 4, 5)),
        (tiles.SCALED_LINEAR_TILES, (64, 24576), (64, 64, 128, 4, 4)),
        (tiles.SCALED_LINEAR_TILES, (128, 4096), (64, 64, 256, 4, 5)),
        (tiles.SCALED_LINEAR_TILES, (128, 24576), (64, 64, 128, 4, 4)),
        (tiles.SCALED_LINEAR_TILES, (256, 4096), (64, 64, 128, 4, 4)),
        (tiles.SCALED_LINEAR_TILES, (1024, 4096), (128, 128, 128, 8, 4)),
        (tiles.SCALED_LINEAR_BLOCK_TILES, (64, 4096), (64, 32, 128, 4, 6)),
        (tiles.SCALED_LINEAR_BLOCK_TILES, (128, 4096), (64, 64, 128, 4, 6)),
        (tiles.SCALED_LINEAR_BLOCK_TILES, (8192, 24576), (128, 128, 128, 8, 4)),
    ],
)
def test_a_scaled_linear_of_many_rows_takes_the_measured_tile(
    table: tile_table.TileTable[tile_table.Launch],
    sizes: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    tile = table.choose(CPU, *sizes)
    assert tuple(tile[name] for name in names) == expected


@pytest.mark.parametrize(
    "rows, dtype, int4, expected",
    [  # BLOCK_M, BLOCK_N, BLOCK_K, PARTS, num_warps, num_stages
        (8, torch.uint8, False, (8, 16, 128, 4, 4, 3)),
        (16, torch.bfloat16, True, (16, 16, 128, 4, 4, 3)),
        (17, torch.bfloat16, False, (64, 32, 64, 4, 4, 2)),
        (2, torch.float32, True, (16, 16, 32, 4, 4, 2)),
    ],
)
def test_a_linear_of_four_bit_weights_takes_the_measured_tile(
    rows: int, dtype: torch.dtype, int4: bool, expected: tuple[int, ...]
) -> None:
    table = tiles.LINEAR_W4A16 if int4 else tiles.LINEAR_MXFP4
    tile = w4a16.tile_for(table, torch.empty(rows, 4096, dtype=dtype), 4096)
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "PARTS", "num_warps", "num_stages")
    assert tile == dict(zip(names, expected, strict=True))


@pytest.mark.parametrize(
    "rows, outputs, columns, splits",
    [
        (8, 4096, 4096, 4),
        (8, 4096, 12288, 6),
        (9, 24576, 4096, 2),
        (16, 4096, 4096, 8),
        (64, 2048, 4096, 4),
        (128, 6144, 4096, 4),
        (256, 151936, 4096, 1),
        (9, 64, 512, 1),
        (9, 64, 480, 1),
    ],
)
def test_columns_of_4_bit_weights_are_split_until_there_are_programs_enough(
    rows: int, outputs: int, columns: int, splits: int
) -> None:
    assert tiles.LINEAR_4_BITS.choose(CPU, rows).splits(outputs, columns) == splits


@pytest.mark.parametrize("columns, words", [(32, 4), (1536, 256), (4096, 512), (12288, 512)])
def test_one_row_reads_no_more_words_of_four_bit_codes_than_there_are(
    columns: int, words: int
) -> None:
    tile = w4a16.tile_for(tiles.LINEAR_W4A16, torch.empty(1, columns), columns)
    assert tile == {"BLOCK_N": 4, "BLOCK_W": words, "num_warps": 4}


@pytest.mark.parametrize(
    "rows, columns, expected",
    [  # BLOCK, ROWS, num_warps
        (64, 128, (128, 4, 4)),
        (4097, 128, (128, 16, 16)),
        (1, 1000, (1024, 1, 4)),
        (64, 4096, (4096, 1, 4)),
        (8192, 12288, (16384, 1, 16)),
        (1, 65536, (65536, 1, 32)),
    ],
)
def test_a_norm_takes_the_measured_tile(
    rows: int, columns: int, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_table, "MAX_WARPS", 32)
    tile = norm.tile_for(torch.empty(rows, columns, dtype=torch.bool), columns)
    assert (tile["BLOCK"], tile["ROWS"], tile["num_warps"]) == expected


@pytest.mark.parametrize(
    "scheme, rows, columns, quant, gated",
    [  # BLOCK, ROWS, num_warps of the quantizer, and behind silu(gate) * up
        ("fp8_group", 64, 128, (128, 4, 4), (128, 4, 4)),
        ("fp8_group", 8192, 128, (128, 8, 4), (128, 8, 4)),
        ("fp8_group", 8192, 3072, (2048, 1, 4), (256, 8, 8)),
        ("mxfp4", 64, 12288, (2048, 1, 4), (2048, 1, 4)),
        ("fp8_per_token", 1, 512, (512, 2, 4), (512, 2, 4)),
        ("fp8_per_token", 1024, 3072, (4096, 1, 4), (4096, 1, 8)),
        ("fp8_per_token", 8192, 3072, (4096, 1, 4), (4096, 1, 4)),
        ("int8_per_token", 8192, 12288, (16384, 1, 16), (16384, 1, 8)),
        ("int8_per_token", 1, 20480, (32768, 1, 32), (32768, 1, 16)),
    ],
)
def test_a_quantizer_takes_the_measured_tile(
    scheme: str, rows: int, columns: int, quant: tuple[int, ...], gated: tuple[int, ...]
) -> None:
    out = Quantized(torch.empty(2, columns), None, scheme)
    found = [out.tile(rows, columns), activation_quant._tile(out, rows, columns)]
    assert [(t["BLOCK"], t["ROWS"], t["num_warps"]) for t in found] == [quant, gated]


@pytest.mark.parametrize(
    "rows, sequences, group, kv_heads, width, itemsize, longest, expected",
    [  # rows, keys, splits, warps, stages, by_sequence, registers
        (1, 1, 4, 8, 128, 2, 1024, (16, 64, 16, 4, 3, True, None)),
        (4, 4, 4, 8, 128, 2, 40960, (16, 64, 12, 4, 3, True, None)),
        (64, 64, 4, 8, 128, 2, 1024, (16, 64, 1, 4, 3, True, 128)),
        (8, 8, 2, 8, 128, 2, 8192, (16, 64, 8, 4, 3, True, 128)),
        (16, 16, 8, 2, 256, 2, 8192, (16, 64, 4, 8, 5, True, None)),
        (1024, 1, 2, 8, 128, 2, 1024, (64, 64, 1, 4, 5, False, None)),
        (8192, 1, 2, 8, 128, 2, 8192, (128, 64, 1, 8, 2, False, 128)),
        (575, 64, 4, 8, 128, 2, 8192, (64, 64, 1, 4, 5, False, None)),
        (16384, 16, 4, 8, 128, 2, 1024, (128, 64, 1, 8, 2, False, 128)),
        (8, 1, 2, 1, 64, 4, 1024, (32, 32, 32, 8, 2, False, None)),
        (64, 64, 8, 4, 256, 2, 1024, (16, 32, 2, 4, 3, True, None)),
        (1024, 1, 1, 16, 192, 2, 1024, (64, 64, 1, 4, 2, False, None)),
        (4096, 4, 1, 128, 192, 2, 4096, (64, 64, 1, 4, 2, False, None)),
        (8192, 1, 8, 4, 256, 2, 8192, (128, 32, 1, 8, 2, False, None)),
    ],
)
def test_paged_attention_takes_the_measured_tiling(
    rows: int,
    sequences: int,
    group: int,
    kv_heads: int,
    width: int,
    itemsize: int,
    longest: int,
    expected: tuple[object, ...],
) -> None:
    found = attention_tiles.tiling(rows, sequences, group, kv_heads, width, itemsize, longest, CPU)
    assert tuple(found) == expected


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_tiles_has_a_limit_per_size_and_an_entry_without_limits(name: str) -> None:
    table = TABLES[name]
    assert table.command.startswith("python bench/")
    for entries in table.by_arch.values():
        assert all(len(limits) == len(table.sizes) for limits, _ in entries)
        assert entries[-1][0] == (tile_table.ANY,) * len(table.sizes)


def test_another_architecture_uses_its_own_entries_and_the_first_if_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = tile_table.TileTable(
        "", ("rows",), {"sm90": [((4,), "a"), ((9,), "b")], "sm80": [((9,), "c")]}
    )
    for arch, expected in {"sm90": "ab", "sm80": "cc", "sm100": "ab"}.items():
        monkeypatch.setattr(tile_table, "_arch", lambda device, arch=arch: arch)
        assert table.choose(CPU, 4) + table.choose(CPU, 5) == expected


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pytest.mark.parametrize(
    "platform, note", [("h200", ""), ("sm90", ""), ("sm100", "tiles not measured on this GPU")]
)
def test_a_kernel_whose_tiles_were_measured_on_another_gpu_has_a_note_in_the_report(
    platform: str, note: str
) -> None:
    x = torch.randn(3, 8)
    report = atomc.explain(gated, x, x, options={"glue": "eager"}, platform=platform)
    (choice,) = report.kernels
    assert (choice.op, choice.chosen, choice.note) == ("silu_and_mul", "triton", note)
    assert ("triton (tiles not measured on this GPU)" in report.to_text()) == bool(note)


def test_a_kernel_without_tiles_to_choose_has_no_note() -> None:
    kernels.load("cuda")
    assert {k.tuned_for for k in ops.linear.kernels if k.provider != "triton"} == {None}
    linear = torch.nn.Linear(16, 16, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(64, 16, dtype=torch.bfloat16)  # more rows than the Triton kernel takes
    report = atomc.explain(linear, x, options={"glue": "eager"}, platform="sm100")
    assert [(choice.chosen, choice.note) for choice in report.kernels] == [("cuda", "")]
    assert Platform.named("sm100").arch not in tiles.LINEAR.archs


def test_tiles_that_no_gpu_has_timed_yet_have_a_note_everywhere() -> None:
    table = tile_table.TileTable("", ("rows",), {"sm90": [((9,), "a")]}, measured=False)
    assert (table.archs, table.choose(CPU, 4)) == ((), "a")

    def routed(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return ops.moe_experts(x, ids, weights, w13, w2)

    ids, weights = torch.zeros(20, 1, dtype=torch.int32), torch.ones(20, 1)
    operands = [torch.randn(shape) for shape in ((20, 16), (2, 32, 16), (2, 16, 16))]
    x, w13, w2 = (each.bfloat16() for each in operands)
    report = atomc.explain(
        routed, x, ids, weights, w13, w2, options={"glue": "eager"}, platform="h200"
    )
    (choice,) = report.kernels
    assert (choice.chosen, choice.note) == ("triton", "tiles not measured on this GPU")
