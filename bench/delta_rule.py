"""Time the gated delta rule, its convolution and the norm after it in Triton (Qwen3.5's widths: 16
key heads and 32 value heads of 128, four taps), on the GPU that is here: microseconds; of norms and
of steps of one token the share of the bandwidth of a copy, of prompts TFLOP/s.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from kernels import copy_bandwidth
from latent_attention import seconds
from torch import Tensor

from atomc.kernels.triton.launch.tile_table import Launch, RowTile
from atomc.kernels.triton.launch.tiles import DELTA_DECODE, NORM_GATED
from atomc.kernels.triton.recurrent import conv, conv_delta_rule, delta_rule
from atomc.kernels.triton.recurrent.delta_chunks import DeltaRows, launch_chunks
from atomc.kernels.triton.rows import norm_gated

EXAMPLES = """examples:
  all cases:           python bench/delta_rule.py
  decode steps:        python bench/delta_rule.py --only decode
  other tiles:         python bench/delta_rule.py --sweep --only "prompt 1 x"
  the norm's tiles:    python bench/delta_rule.py --sweep --only norm
"""
KEY_HEADS, HEADS, WIDTH, TAPS, CHUNK = 16, 32, 128, 4, 64
CHANNELS = (2 * KEY_HEADS + HEADS) * WIDTH
CASES = {
    **{f"decode {count}": [(1, 1000)] * count for count in (1, 8, 64)},
    "prompt 1 x 1024": [(1024, 1024)],
    "prompt 1 x 8192": [(8192, 8192)],
    "prompt 1 x 65536": [(65536, 65536)],
    "prompt 64 x 1024": [(1024, 1024)] * 64,
    "mixed 63 and 1 x 512": [(1, 1000)] * 63 + [(512, 512)],
}
# Products of a chunk, per token and head: with the state three times, with its keys and queries,
# with its inverse and weights.
FLOPS = 2 * (3 * WIDTH * WIDTH + 2 * CHUNK * WIDTH + 2 * CHUNK * WIDTH)
STEP_TILES = [
    {"BLOCK_V": block, "num_warps": warps} for block, warps in product((8, 16, 32, 64), (1, 2, 4))
]
CHUNK_TILES = [
    {"BLOCK_V": block, "num_warps": warps, "num_stages": stages}
    for block, warps, stages in product((32, 64, 128), (4, 8), (1, 2, 3))
]
NORMS = {f"norm of {tokens} tokens": tokens for tokens in (1, 8, 64, 1024, 8192)}
NORM_TILES = [RowTile(rows, warps) for rows, warps in product((1, 4, 8, 16, 32), (1, 2, 4, 8, 16))]


class Inputs:
    """The arguments of one step; states rotate, several times the L2 in all."""

    def __init__(self, sequences: list[tuple[int, int]]):
        like = {"device": "cuda", "dtype": torch.bfloat16}
        count, tokens = len(sequences), sum(new for new, _ in sequences)
        shape = (count, HEADS, WIDTH, WIDTH)
        self.state_bytes = 4 * count * HEADS * WIDTH * WIDTH
        copies = max(1, min(16, 512 * 2**20 // self.state_bytes))
        self.states = [torch.randn(shape, device="cuda") for _ in range(copies)]
        self.inputs = torch.randn(count, TAPS - 1, CHANNELS, **like)
        self.x, self.weight = (
            torch.randn(tokens, CHANNELS, **like),
            torch.randn(CHANNELS, 4, **like),
        )
        split = [KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * WIDTH]
        q, k, v = (part.unflatten(-1, (-1, WIDTH)) for part in self.x.split(split, -1))
        g = -torch.rand(tokens, HEADS, device="cuda")
        self.rows = q, k, v, g, torch.rand(tokens, HEADS, **like)
        self.of_heads = torch.randn(HEADS, **like), torch.randn(HEADS, **like)
        starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0).to(torch.int32)
        lengths = torch.tensor([length for _, length in sequences], dtype=torch.int32)
        self.step = starts.cuda(), lengths.cuda(), torch.randperm(count).cuda()

    def rules(self, decode: bool, tile: dict[str, int] | None) -> list[Callable[[], object]]:
        """A call for each state, with this tile, or with that of the table."""
        return [partial(self._rule, state, decode, tile) for state in self.states]

    def _rule(self, state: Tensor, decode: bool, tile: dict[str, int] | None) -> None:
        scale = WIDTH**-0.5
        if tile is None:
            delta_rule.gated_delta_rule_update(*self.rows, state, *self.step, scale=scale)
            return
        rows = DeltaRows(*self.rows, state, *self.step, scale)
        launch = delta_rule.launch_steps if decode else launch_chunks
        launch(rows, torch.empty_like(rows.v), 0, tile)

    def fused(self, tile: Launch) -> list[Callable[[], object]]:
        """Of a step of decoding, convolution, gates and rule at once: a call for each state."""
        (arrived,) = conv_delta_rule.arrivals(self.step[1], KEY_HEADS)
        _, _, v, g, beta = self.rows
        given = self.x, self.weight, None, self.inputs, g, beta, *self.of_heads
        more = {"activation": "silu", "scale": WIDTH**-0.5, "arrived": arrived, "tile": tile}
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        return [
            partial(conv_delta_rule.launch_decode, *given, state, *self.step, out=out, **more)
            for state in self.states
        ]

    def convolve(self) -> Tensor:
        return conv.causal_conv1d_update(
            self.x, self.weight, None, self.inputs, *self.step, activation="silu"
        )


def tried(decode: bool, sweep: bool) -> Iterator[dict[str, int] | None]:
    """The tiles to time; None: those of the table."""
    yield None
    if sweep:
        yield from STEP_TILES if decode else CHUNK_TILES


def time_norm(name: str, tokens: int, tiles: list[RowTile], copied: float) -> None:
    """The norm of the values, whose gate is cut from a merged projection."""
    like = {"device": "cuda", "dtype": torch.bfloat16}
    weight, columns = torch.randn(WIDTH, **like), CHANNELS + (HEADS + 2) * WIDTH
    moved = 3 * 2 * tokens * HEADS * WIDTH
    calls = []
    for _ in range(max(1, min(16, 512 * 2**20 // moved))):
        x, projected = (
            torch.randn(tokens, HEADS, WIDTH, **like),
            torch.randn(tokens, columns, **like),
        )
        gate = projected[:, CHANNELS:][:, : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH))
        calls.append((x, gate, weight, torch.empty_like(x), 1e-6, "after"))
    for tile in tiles:
        taken = seconds([partial(norm_gated.launch, *call, tile) for call in calls])
        print(
            f"{name}: {taken * 1e6:.1f} us, {moved / taken / copied:.0%} of copy bandwidth, {tile}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="time other tiles as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("delta_rule.py times Triton kernels and needs a GPU; torch sees none")
    print(f"python {' '.join(sys.argv)}: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    copied = copy_bandwidth()
    for name, sequences in CASES.items():
        if args.only not in name:
            continue
        inputs, decode = Inputs(sequences), name.startswith("decode")
        tokens = len(inputs.x)
        print(f"{name}: convolution {seconds([inputs.convolve] * 8) * 1e6:.1f} us")
        for tile in tried(decode, args.sweep):
            try:
                taken = seconds(inputs.rules(decode, tile))
            except Exception as error:  # too much shared memory, most often: the sweep goes on
                print(f"{name}: {tile}: {type(error).__name__}")
                continue
            share = 2 * inputs.state_bytes / taken / copied
            rate = FLOPS * tokens * HEADS / taken / 1e12
            per = f"{share:.0%} of copy bandwidth" if decode else f"{rate:.0f} TFLOP/s"
            print(f"{name}: rule {taken * 1e6:.1f} us, {per}, {tile or 'the tile of the table'}")
        if decode:
            table = DELTA_DECODE.choose(torch.device("cuda"), len(sequences) * HEADS)
            for tile in [table, *(STEP_TILES if args.sweep else [])]:
                taken = seconds(inputs.fused(tile))
                share = 2 * inputs.state_bytes / taken / copied
                print(f"{name}: fused {taken * 1e6:.1f} us, {share:.0%} of copy bandwidth, {tile}")
    for name, tokens in NORMS.items():
        if args.only in name:
            chosen = NORM_GATED.choose(torch.device("cuda"), tokens * HEADS, WIDTH)
            time_norm(name, tokens, [chosen, *(NORM_TILES if args.sweep else [])], copied)


if __name__ == "__main__":
    main()
