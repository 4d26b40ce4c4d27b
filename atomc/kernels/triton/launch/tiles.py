"""Tile choices of the Triton kernels, as one table per kernel family and GPU architecture.

To tune for another GPU, run the command of a table there and add an entry to its `by_arch`. On an
architecture without an entry the first one is used, and the report says so.
"""

from dataclasses import replace

from atomc.kernels.triton.launch.tile_table import (
    ANY,
    AttentionTile,
    ExpertsFewTile,
    FragmentTile,
    Launch,
    LoraTile,
    RowTile,
    StripTile,
    Tile,
    TileTable,
)

# us, ours / cuBLAS. 1 row: 1024->4096 3.7 / 4.9, 3072->1024 3.0 / 7.4, 4096->6144 13.0 / 15.6,
# 12288->4096 25 / 29, 4096->151936 273 / 299. 2 rows: 2048->1024 2.8 / 8.3, 3072->1024 3.7 / 7.5
# (3.5 and 4.3 on tensor cores). 8 rows: 2048->1024 3.5 / 5.8, 1024->4096 4.0 / 5.3, 4096->6144
# 14.4 / 15.4, 4096->24576 49.3 / 52.7. 16 rows: 2048->1024 3.5 / 5.8, 1024->151936 80.8 / 81.3,
# 4096->6144 15.2 / 15.4, 4096->24576 52.5 / 50.9. The best of 40 tiles at ten shapes of Qwen3-0.6B
# and 8B. With less than 2,048 outputs tiles are smaller, for more programs than multiprocessors.
# 1 row, of the best of 44 tiles at 36 shapes of eight models at most 1.09 times. A step of 2,048
# columns wastes what K leaves of the last one: us with it / here, 1152->1536 2.9 / 2.1, 1152->13824
# 10.9 / 9.2, 6912->1152 6.5 / 5.2, 9728->2560 16.1 / 13.3, 3072->9216 17.4 / 15.2.
LINEAR = TileTable(
    "python bench/gemm.py --tiles --schemes bf16 --rows 1 8 --shapes 1152x1536 --jobs 14",
    ("rows", "outputs", "inputs", "inputs modulo 2048"),
    {
        "sm90": [
            ((1, 2047, 1024, ANY), Tile(1, 2, 1024, 0, 4)),
            ((1, 1024, 3072, ANY), Tile(1, 2, 2048, 0, 4)),
            ((1, 2047, ANY, 0), Tile(1, 2, 2048, 0, 4)),
            ((1, ANY, 1024, ANY), Tile(1, 4, 1024, 0, 4)),
            ((1, ANY, 2048, 0), Tile(1, 2, 1024, 0, 4)),
            ((1, ANY, ANY, 0), Tile(1, 4, 2048, 0, 4)),
            ((1, ANY, 4095, ANY), Tile(1, 4, 128, 0, 8)),
            ((1, ANY, ANY, ANY), Tile(1, 1, 1024, 0, 8)),
            ((2, 2047, ANY, ANY), Tile(2, 2, 1024, 0, 4)),
            ((8, 2047, 4095, ANY), Tile(8, 16, 64, 4, 4, 6)),
            ((8, ANY, 4095, ANY), Tile(8, 16, 64, 4, 4, 4)),
            ((8, ANY, ANY, ANY), Tile(8, 16, 128, 4, 4, 3)),
            ((ANY, 2047, ANY, ANY), Tile(16, 8, 64, 4, 4, 6)),
            ((ANY, 8192, ANY, ANY), Tile(16, 16, 256, 2, 2, 3)),
            ((ANY, ANY, 2047, ANY), Tile(16, 16, 256, 1, 1, 4)),
            ((ANY, ANY, ANY, ANY), Tile(16, 16, 256, 2, 2, 3)),
        ]
    },
)

# One row of a product with a gate. us, two kernels / one: 1024->2x3072 5.3 / 4.6, 1152->2x6912 9.9
# / 9.3, 2048->2x6144 14.1 / 13.4, 3072->2x8192 28.2 / 26.4, 4096->2x12288 51.2 / 48.2,
# 5120->2x17408 83.4 / 82.6.
LINEAR_GATED = TileTable(
    "python bench/fusions.py --chains linear_gated --tokens 1 --jobs 14",
    ("inputs", "inputs modulo 2048"),
    {
        "sm90": [
            ((1024, ANY), Tile(1, 4, 1024, 0, 4)),
            ((2048, 0), Tile(1, 2, 1024, 0, 4)),
            ((4095, ANY), Tile(1, 4, 128, 0, 8)),
            ((ANY, 0), Tile(1, 4, 2048, 0, 8)),
            ((ANY, ANY), Tile(1, 4, 2048, 0, 4)),
        ]
    },
)

# 1 row, us: fp8 4096->4096 6.8, 4096->24576 25.4, 12288->4096 14.4; blocks 6.9, 26.2, 15.3.
SCALED_LINEAR = TileTable(
    "python bench/gemm.py --tiles --rows 1 8 16 --schemes fp8 fp8_block int8 --jobs 14",
    ("rows", "inputs"),
    {
        "sm90": [
            ((1, 512), Tile(1, 4, 512, 0, 4)),
            ((1, 4096), Tile(1, 2, 1024, 0, 4)),
            ((1, ANY), Tile(1, 2, 2048, 0, 8)),
            ((8, ANY), Tile(8, 16, 128, 4, 4, 4)),
            ((ANY, ANY), Tile(16, 16, 128, 4, 4, 3)),
        ]
    },
)


def _product(
    rows: int, weight_rows: int, columns: int, num_stages: int, num_warps: int = 4, tall: int = 8
) -> Launch:
    return {
        "BLOCK_M": rows,
        "BLOCK_N": weight_rows,
        "BLOCK_K": columns,
        "TALL": tall,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


# As large as leaves most of the 132 multiprocessors a tile; one that has only one tile has room for
# more stages. 64 rows of fp8, us with 32 / 64 / 128 rows of the weight: 4096->4096 8.7 / 9.2 / -,
# 4096->24576 - / 28.4 / 29.0. 128 rows, 4096->24576 with 64 x 64 38.9, 128 x 64 40.1; 256 rows with
# 128 x 128 61.3, 128 x 64 61.5.
_MANY_ROWS = [
    ((256, 8320), _product(64, 64, 128, 4)),
    ((512, 4096), _product(64, 64, 128, 4)),
    ((1024, 2048), _product(64, 64, 128, 4)),
    ((ANY, ANY), _product(128, 128, 128, 4, num_warps=8)),
]
SCALED_LINEAR_TILES = TileTable[Launch](
    "python bench/gemm.py --rows 32 64 128 256 1024 --schemes fp8 int8 --jobs 14",
    ("rows", "outputs"),
    {
        "sm90": [
            ((64, 4224), _product(64, 32, 256, 5)),
            ((64, 6143), _product(64, 32, 128, 4)),
            ((64, 8448), _product(64, 64, 256, 5)),
            ((128, 4224), _product(64, 64, 256, 5)),
            ((128, ANY), _product(64, 64, 128, 4)),
            *_MANY_ROWS,
        ]
    },
)
# A scale belongs to a block of 128 columns. 128 rows, us, 12288->4096: 34.8, with 128 x 128 66.7.
SCALED_LINEAR_BLOCK_TILES = TileTable[Launch](
    "python bench/gemm.py --rows 32 64 128 256 1024 --schemes fp8_block --jobs 14",
    ("rows", "outputs"),
    {
        "sm90": [
            ((64, 4224), _product(64, 32, 128, 6)),
            ((64, 6143), _product(64, 32, 128, 4)),
            ((64, 8448), _product(64, 64, 128, 6)),
            ((128, 4224), _product(64, 64, 128, 6)),
            ((128, ANY), _product(64, 64, 128, 4)),
            *_MANY_ROWS,
        ]
    },
)

# A tile without BLOCK_M takes one row of x per program.
_W4A16_ROW = dict(BLOCK_N=4, BLOCK_W=512, num_warps=4)
_W4A16_16 = dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=128, PARTS=4, num_warps=4, num_stages=3)
_W4A16_64 = dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, PARTS=4, num_warps=4, num_stages=2)
# Several rows: of fp32, or with scales that LINEAR_4_BITS is not for.
LINEAR_W4A16 = TileTable[Launch](
    "python bench/gemm.py --tiles --rows 1 --schemes int4 int4_g128 --jobs 14",
    ("rows",),
    {"sm90": [((1,), _W4A16_ROW), ((ANY,), _W4A16_16)]},
)
# us, 8 / 64 / 128 rows: 4096->4096 6.4 / 10.1 / 14, 4096->6144 8.1 / 12.8 / 22, 4096->24576 21 / 32
# / 64, 12288->4096 13 / 20 / 35, 2048->5120 6.0 / 9.0 / 14. Within 8% of the best of 24 tiles.
LINEAR_4_BITS = TileTable(
    "python bench/gemm.py --tiles --rows 8 16 64 128 --schemes int4 --jobs 14",
    ("rows",),
    {
        "sm90": [
            ((8,), StripTile(8, 64, 4, 4, 396, 1024)),
            ((16,), StripTile(16, 128, 4, 3, 396)),
            ((32,), StripTile(32, 64, 4, 4, 396, 1024)),
            ((64,), StripTile(64, 64, 4, 3, 396, 1024)),
            ((ANY,), StripTile(128, 64, 4, 3, 396, 1024)),
        ]
    },
)
# 8 rows, us with BLOCK_K=128 and 3 stages / 256 and 2: 4096->4096 12.4 / 12.5, 4096->24576 57 / 58.
LINEAR_MXFP4 = TileTable[Launch](
    "python bench/gemm.py --tiles --rows 1 8 16 --schemes mxfp4 mxfp4_a16 --jobs 14",
    ("rows",),
    {
        "sm90": [
            ((1,), _W4A16_ROW),
            ((8,), _W4A16_16 | dict(BLOCK_M=8)),
            ((16,), _W4A16_16),
            ((ANY,), _W4A16_64),
        ]
    },
)

# The kernels of MXFP4, and as many bytes of codes.
LINEAR_NVFP4 = replace(
    LINEAR_MXFP4,
    command="python bench/gemm.py --tiles --rows 1 8 16 --schemes nvfp4_a16 --jobs 14",
    measured=False,
)

# Adapters of rank 16 at the layers of Qwen3-8B, us of a decoder layer, H100: 1 row 9.5, 8 rows with
# as many adapters 12.8. With two warps for the second kernel 11.1 and 20.1, with four and 4,096
# products 15.4 and 40.8; with 8 rows of A for each program of the first, 512 columns and four warps
# 13.7 with 8 rows.
LORA_FEW = TileTable[LoraTile](
    "python bench/lora.py --tiles",
    ("rows",),
    {"sm90": [((ANY,), LoraTile(4, 1024, 2, 2048, 1))]},
)


# A block is about twice as long as an expert has pairs. Experts of Qwen3-30B, us with 64 rows of
# 128 columns / 128 of 64: 16 tokens 186 / 199, 64 281 / 287; DeepSeek-V2-Lite, 16: 204 / 217.
MOE_EXPERTS = TileTable[Launch](
    "python bench/moe.py --tiles --formats bf16 --tokens 64 256 1024 4096",
    ("pairs per expert",),  # 0: a block is one pair
    {
        "sm90": [
            ((8,), _product(16, 64, 128, 5, tall=1)),
            ((24,), _product(32, 128, 64, 4, tall=1)),
            ((96,), _product(64, 128, 64, 4, tall=1)),
            ((ANY,), _product(128, 256, 64, 4, num_warps=8)),
        ]
    },
    measured=False,
)
# Experts of Qwen3-30B in fp8, us with 128 rows / 64 / 64 of 256 columns: 1 token 18.3 / 17.4 /
# 16.6, 2 26.9 / 28.3 / 28.3, 16 105.9 / 108.0 / 111.6, 64 154.9 / 158.0 / 163.3.
MOE_EXPERTS_8_BITS = TileTable[Launch](
    "python bench/moe.py --tiles --formats fp8 fp8_block int8 --tokens 1 64 256 1024 4096",
    ("pairs per expert",),  # 0: a block is one pair
    {
        "sm90": [
            ((8,), _product(16, 128, 128, 4, tall=1)),
            ((24,), _product(32, 128, 128, 4, tall=1)),
            ((96,), _product(64, 128, 128, 4, tall=1)),
            ((ANY,), _product(128, 128, 128, 4, num_warps=8)),
        ]
    },
    measured=False,
)
# Not eight warps: with 128 x 128 x 64 and three stages, one tile in some 10,000 has wrong values of
# a row of the weight (Triton 3.6, H200).
MOE_EXPERTS_4_BITS = TileTable[Launch](
    "python bench/moe.py --tiles --formats int4 int4_g128 mxfp4 --tokens 64 256 1024 4096",
    ("pairs per expert",),
    {
        "sm90": [
            ((8,), _product(16, 64, 128, 4, tall=1)),
            ((24,), _product(32, 64, 128, 4, tall=1)),
            ((96,), _product(64, 128, 64, 3, tall=1)),
            ((ANY,), _product(128, 64, 64, 3)),
        ]
    },
    measured=False,
)

# GPT-OSS-20B in MXFP4, gate and up / down, us, H100, of 36 tiles: 1 token 15.5 / 10.7 (32 rows, two
# warps 15.8 / 11.5, blocks of 16 17.1 / 11.5), 8 tokens 68 / 39 (64 rows 68 / 43, blocks of 16
# 72 / 43), 64 tokens 108 / 59 (blocks of 8 111 / 59, of 32 114 / 62), 1,024 tokens 411 / 214
# (blocks of 64 414 / 202; eight warps of 128 rows 410 / 210). All of Qwen3-30B in int4, us, H200,
# with 16 rows by one warp / 64 by two: 1 token 16.3 / 17.1, 2 25.4 / 22.8, 4 46.7 / 37.2; of
# GPT-OSS 1 token 26.3 / 28.4, 2 43.2 / 39.7. 64 rows in four stages / three: 8 tokens of Qwen3-30B
# 56.4 / 52.6, 64 113.7 / 110.2. Two sums in turns, which do not wait for each other, are no faster.
EXPERTS_FRAGMENTS = TileTable(
    "python bench/moe.py --tiles --formats int4 int4_g128 mxfp4 --tokens 1 8 64 1024",
    ("pairs per expert", "pairs"),  # 0 per expert: a block is one pair
    {
        "sm90": [
            ((0, 8), FragmentTile(8, 16, 1, 4)),
            ((4, ANY), FragmentTile(8, 64, 2, 3)),
            ((12, ANY), FragmentTile(16, 64, 2, 3)),
            ((32, ANY), FragmentTile(32, 64, 4, 4)),
            ((64, ANY), FragmentTile(64, 128, 4, 3, tall=8)),
            ((256, ANY), FragmentTile(128, 64, 4, 3, tall=8)),
            ((ANY, ANY), FragmentTile(128, 128, 8, 3, tall=8)),
        ]
    },
)

# A row of the weight takes as many threads as in LINEAR.
EXPERTS_FEW = TileTable(
    "python bench/moe.py --tiles --formats bf16 --tokens 1 2 4 8 16",
    ("tokens",),
    {
        "sm90": [
            ((1,), ExpertsFewTile(4096, 2048, 2048, 8)),
            ((ANY,), ExpertsFewTile(8192, 2048, 2048, 8)),
        ]
    },
)
EXPERTS_FEW_4_BITS = TileTable(
    "python bench/moe.py --tiles --formats int4 int4_g128 mxfp4 --tokens 1 2 4 8 16",
    ("tokens",),
    {"sm90": [((ANY,), ExpertsFewTile(16384, 8192, 1024, 4))]},
    measured=False,
)

# qk_norm_rope_kv_write of 24 heads of 128, us with 1 / 4 / 8 / 16 / 32 rows per program: 1 token
# 1.1 / 1.0 / - / - / -, 64 tokens - / 2.2 / 2.5 / - / 5.0, 1,024 tokens 31 / - / 6.8 / 6.4 / 6.9,
# 8,192 tokens 238 / - / 39.5 / 37.6 / 38.0.
HEAD_ROWS = TileTable(
    "python bench/kernels.py --json bench/results/kernels-h200.json",
    ("rows",),
    {"sm90": [((4096,), 4), ((ANY,), 16)]},
)

# add_rms_norm, us with 2 / 4 / 8 / 16 warps: 1 x 1024 0.89 / 0.87 / 0.88 / -, 8192 x 1024 18.4 /
# 18.1 / - / -, 1 x 4096 - / 1.18 / 1.18 / 1.21, 64 x 4096 - / 2.10 / 2.15 / 2.26, 8192 x 4096 - /
# 67.0 / 67.4 / 66.6. Rows up to 256 wide are heads, as in HEAD_ROWS. 8,192 rows with 1 / 2 of them
# by four warps: layer_norm 768 wide 11.2 / 7.6, 1024 11.2 / 7.4; add_layer_norm 13.7 / 12.5, 18.7 /
# 18.5, without the sum 10.8 / 7.9, 13.7 / 12.6; add_rms_norm_quant of 2048 29.7 / 30.7.
NORM = TileTable(
    "python bench/kernels.py --json bench/results/kernels-h200.json",
    ("rows", "block"),
    {
        "sm90": [
            ((4096, 256), RowTile(4, 4)),
            ((ANY, 256), RowTile(16, 16)),
            ((2048, 4096), RowTile(1, 4)),
            ((ANY, 1024), RowTile(2, 4)),
            ((ANY, 4096), RowTile(1, 4)),
            ((ANY, 8192), RowTile(1, 8)),
            ((ANY, 16384), RowTile(1, 16)),
            ((ANY, ANY), RowTile(1, 32)),
        ]
    },
)

# First values. Rows are heads: of 128 columns a thread has 8 neighbours, 16 bytes, of x and as many
# of the gate. The compiler's loads for sm90: with 4 rows and 4 warps, and with 16 and 16, 8 bytes.
NORM_GATED = TileTable(
    "python bench/delta_rule.py --sweep --only norm",
    ("rows", "block"),
    {
        "sm90": [
            ((4096, 256), RowTile(4, 4)),
            ((ANY, 256), RowTile(16, 8)),
            *NORM.by_arch["sm90"][2:],
        ]
    },
)

QUANT_BLOCK = 2048  # columns of a program, at most, unless a row has one scale
QUANT = TileTable(
    "python bench/fusions.py --jobs 15 --json bench/results/fusions-h200.json",
    ("rows", "block"),
    {
        "sm90": [
            ((4096, 256), RowTile(4, 4)),
            ((ANY, 64), RowTile(16, 4)),
            ((ANY, 128), RowTile(8, 4)),
            ((ANY, 256), RowTile(4, 4)),
            ((ANY, 512), RowTile(2, 4)),
            ((ANY, 4096), RowTile(1, 4)),
            ((ANY, 8192), RowTile(1, 8)),
            ((ANY, 16384), RowTile(1, 16)),
            ((ANY, ANY), RowTile(1, 32)),
        ]
    },
)

# silu_and_mul, us with 512 / 1024 / 2048 columns: 1 x 3072 0.73 / 0.73 / 0.80, 64 x 12288 2.8 / 2.4
# / 2.6. gelu_and_mul with 8 rows of 256 / 8 rows of 128 / one of 1024 and four warps, / one of 2048
# and eight: 1024 x 3072 4.0 / 5.0 / 5.0 / 5.1, 8192 x 1152 15.1 / 14.7 / 21.8 / 15.8, 8192 x 6912
# 81.6 / - / 81.5 / -, 32768 x 1152 54.2 / 54.7 / 81.2 / 55.7.
GATED = TileTable[Launch](
    "python bench/kernels.py --json bench/results/kernels-h200.json",
    ("rows",),
    {
        "sm90": [
            ((1023,), dict(BLOCK=1024, ROWS=1, num_warps=8)),
            ((ANY,), dict(BLOCK=256, ROWS=8, num_warps=4)),
        ]
    },
)

# Warps of silu_and_mul_quant with one scale per row, us with 4 / 8 / 16 / 32: 1,024 rows of 3,072
# 6.6 / 5.8 / 6.3 / -, 8,192 of them 31.7 / 32.8 / - / -, 1,024 rows of 12,288 20.6 / 19.7 / 20.3 /
# -, 65,536 of them - / 914 / 1059 / 1033.
GATED_QUANT_WARPS = TileTable(
    "python bench/fusions.py --jobs 15 --json bench/results/fusions-h200.json",
    ("rows", "block"),
    {
        "sm90": [
            ((ANY, 2048), 4),
            ((4096, 16384), 8),
            ((ANY, 8192), 4),
            ((ANY, 16384), 8),
            ((ANY, 32768), 16),
            ((ANY, ANY), 32),
        ]
    },
)

# Paged attention: bf16, heads of 128, medians of CUDA graph replays, the best of about ten tiles.
# Decode, H100: tiles of 64 keys by four warps, three programs for each multiprocessor / of 128 keys
# by eight, one. 8 key/value heads, 1 x 1,024 keys 6.6 / 7.1 us, 1 x 8,192 17.8 / 18.5; 4 heads,
# 1 x 1,024 5.7 / 6.6, 8 x 1,024 12.0 / 12.2, 8 x 8,192 52.7 / 52.8. 64 x 1,024 keys of 8 heads,
# H200: 67 us with the last tile (84 with 155 registers).
PAGED_DECODE = TileTable(
    "python bench/attention.py --sweep --only decode",
    ("key/value heads of all sequences per 4 multiprocessors", "bytes of a key"),
    {
        "sm90": [
            ((1, 256), AttentionTile(0, 64, 4, 3, 3)),
            ((1, ANY), AttentionTile(0, 64, 8, 5, 1)),
            ((ANY, 256), AttentionTile(0, 64, 4, 3, 4, registers=128)),
            ((ANY, ANY), AttentionTile(0, 32, 4, 3, 4)),
        ]
    },
)

# 63 decodes and a chunk of 512: 82 us, 129 with 128 rows. 1 x 1,024 tokens: 16 heads 23 us (34), 32
# heads 32 (36). But 16 x 1,024 tokens, 32 heads: 535 us, 401 with 128 rows, and 494 with these and
# no limit of registers.
PAGED_PREFILL = TileTable(
    "python bench/attention.py --sweep --only prefill",
    ("query rows per sequence", "tiles of 128 rows per multiprocessor", "bytes of a key"),
    {
        "sm90": [
            ((64, ANY, 256), AttentionTile(64, 64, 4, 5, 2)),
            ((ANY, 2, 256), AttentionTile(64, 64, 4, 5, 2)),
            ((ANY, ANY, 256), AttentionTile(128, 64, 8, 2, 2, registers=128)),
            ((64, ANY, ANY), AttentionTile(64, 32, 4, 5, 2)),
            # Heads of 129 to 192, as of prompts in latent attention. us of 4 x 1,024 tokens with
            # 128 heads / 16, and of 1,024: 563 / 85, 153 / 26; 128, 64, 8, 3: 565 / 85, 154 / 30;
            # 128, 32, 8, 2: 932 / 142, 243 / 38; 64, 32, 4, 3: 585, 156 / 28.
            ((ANY, ANY, 384), AttentionTile(64, 64, 4, 2, 2)),
            ((ANY, 2, ANY), AttentionTile(64, 32, 4, 5, 2)),
            ((ANY, ANY, ANY), AttentionTile(128, 32, 8, 2, 2)),
        ]
    },
)

# First values, from what the compiler says for sm90 and rows of 512 + 64. 16 x 32 takes 128
# registers and 57 KB of shared memory, so that two programs fit; 16 x 64 with 4 warps 255 and 94
# KB; 64 x 32 takes 255 and 147 KB.
LATENT_ATTENTION = TileTable(
    "python bench/latent_attention.py --sweep",
    ("query rows per sequence",),
    {
        "sm90": [
            ((16,), AttentionTile(16, 64, 4, 2, 2)),
            ((32,), AttentionTile(32, 64, 4, 3, 1)),
            ((ANY,), AttentionTile(64, 64, 8, 3, 1)),
        ]
    },
)
# Over codes, which are unpacked in registers: 32 rows and 64 keys with 4 warps take 40 times as
# long. 128 heads, 64 x 8,192 rows of the cache, H100: 744 us, with 32 keys 932. The second one is a
# first value.
LATENT_ATTENTION_CODES = TileTable(
    "python bench/latent_attention.py --fp8 --sweep",
    ("query rows per sequence",),
    {
        "sm90": [
            ((16,), AttentionTile(16, 32, 4, 2, 4)),
            ((32,), AttentionTile(32, 32, 8, 3, 1)),
            ((ANY,), AttentionTile(64, 64, 8, 2, 1)),
        ]
    },
    measured=False,
)

# State per sequence. A program of a convolution has tokens and channels; one of the delta rule has
# columns of the values of a head.
# 1,024 tokens of 8,192 channels, us: 23.0; tiles of 32 tokens with 4 warps 29.2.
CONV = TileTable[Launch](
    "python bench/delta_rule.py",
    ("tokens per sequence",),
    {
        "sm90": [
            ((1,), {"BLOCK_T": 1, "BLOCK_C": 256, "num_warps": 2}),
            ((ANY,), {"BLOCK_T": 16, "BLOCK_C": 128, "num_warps": 2}),
        ]
    },
)
DELTA_STEP = TileTable[Launch](
    "python bench/delta_rule.py --sweep --only decode",
    ("heads of all sequences",),
    {
        "sm90": [
            ((32,), {"BLOCK_V": 16, "num_warps": 1}),
            ((256,), {"BLOCK_V": 32, "num_warps": 1}),
            ((ANY,), {"BLOCK_V": 64, "num_warps": 4}),
        ]
    },
)
# Of up to 256 heads: a program convolves the queries and keys of its head, 4 KB of inputs and
# weights in heads of 128, beside 8 to 32 KB of the state.
DELTA_DECODE = TileTable[Launch](
    "python bench/delta_rule.py --sweep --only decode",
    ("heads of all sequences",),
    {
        "sm90": [
            ((32,), {"BLOCK_V": 16, "num_warps": 1}),
            ((ANY,), {"BLOCK_V": 64, "num_warps": 2}),
        ]
    },
)
DELTA_CHUNKS = TileTable[Launch](
    "python bench/delta_rule.py --sweep --only prompt",
    ("heads of all sequences",),
    {
        "sm90": [
            ((64,), {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3}),
            ((ANY,), {"BLOCK_V": 64, "num_warps": 4, "num_stages": 2}),
        ]
    },
)
