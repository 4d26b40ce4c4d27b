"""Tables of tiles by the sizes of a call, and what a tile of each kernel family consists of.
tiles.py has the tables.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import triton

from atomc.platform import Platform

ANY = 2**63 - 1  # no limit
MAX_WARPS = 16 if torch.version.hip else 32  # a program has at most 1,024 threads

T = TypeVar("T", covariant=True)
Launch = Mapping[str, int]  # constexprs, num_warps and num_stages of a kernel


@dataclass(frozen=True, eq=False)
class TileTable(Generic[T]):
    """The tiles of one kernel family, by the sizes of a call.

    command  times the choices, or the alternatives to them, on the GPU at hand
    sizes    the names of the sizes, in the order of the limits
    by_arch  architecture -> (the largest sizes, the tile); the first entry that fits is used
    measured False: first values, that no GPU has timed yet
    """

    command: str
    sizes: tuple[str, ...]
    by_arch: Mapping[str, Sequence[tuple[tuple[int, ...], T]]]
    measured: bool = True

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures on which the tiles were measured."""
        return tuple(self.by_arch) if self.measured else ()

    def entries(self, arch: str) -> Sequence[tuple[tuple[int, ...], T]]:
        """Those of an architecture, or of the first one."""
        return self.by_arch.get(arch) or next(iter(self.by_arch.values()))

    def choose(self, device: torch.device, *sizes: int) -> T:
        """The tile for these sizes on this device."""
        arch = _arch(device)
        return self.entries(arch)[_first_fit(self, arch, sizes)][1]


@functools.cache
def _arch(device: torch.device) -> str:
    # Triton's interpreter runs on the CPU in place of an H200.
    return Platform.detect("cuda").arch if device.type == "cuda" else "sm90"


@functools.lru_cache(maxsize=4096)
def _first_fit(table: TileTable[object], arch: str, sizes: tuple[int, ...]) -> int:
    return next(
        i
        for i, (limits, _) in enumerate(table.entries(arch))
        if all(size <= limit for size, limit in zip(sizes, limits, strict=True))
    )


class Tile(NamedTuple):
    """Of a product of few rows, what one program takes: rows of x, rows and columns of the weight
    per step; parts of K summed by different warps (0: no tensor cores).
    """

    rows: int
    weight_rows: int
    columns: int
    parts: int
    warps: int
    stages: int = 1


class StripTile(NamedTuple):
    """Of a product of some rows with 4-bit weights in the order of fragments: rows of x, rows of
    the weight, warps and stages; K is split for at most so many programs, into splits of at least
    so many columns. Four warps multiply 64 rows of the weight at once, fewer, or those of less than
    16 rows of x, 16 each.
    """

    rows: int
    weight_rows: int
    warps: int
    stages: int
    programs: int
    columns: int = 512

    def splits(self, rows: int, columns: int) -> int:
        """Of the columns of a weight [rows, columns]."""
        tiles = -(-rows // self.weight_rows)
        return max(1, min(self.programs // tiles, columns // self.columns))


class FragmentTile(NamedTuple):
    """Of experts with 4-bit weights in the order of fragments: pairs in a block, rows of a weight,
    warps, stages, and blocks in a band. Four warps multiply 64 rows at once, fewer 16 each.
    """

    block: int
    weight_rows: int
    warps: int
    stages: int
    tall: int = 1

    def launch(self) -> Launch:
        return dict(
            BLOCK_M=self.block,
            BLOCK_N=self.weight_rows,
            TALL=self.tall,
            num_warps=self.warps,
            num_stages=self.stages,
        )


class ExpertsFewTile(NamedTuple):
    """Of the experts of few tokens, what one program reads per step: a number of elements of gate
    and up, or of down in the rows of all experts of a token, and of a row at most so many columns.

    apart  a program of down takes one of a token's experts, not all of them
    """

    up: int
    down: int
    columns: int
    warps: int
    apart: bool = False

    def up_shape(self, columns: int) -> tuple[int, int]:
        """Rows and columns per step, of rows of so many columns."""
        width = min(self.columns, triton.next_power_of_2(columns))
        return max(self.up // width, 2), width

    def down_shape(self, columns: int, experts: int) -> tuple[int, int]:
        """Rows of each of these experts and columns per step."""
        width = min(max(self.columns // experts, 64), triton.next_power_of_2(columns))
        return max(self.down // (width * experts), 1), width


class RowTile(NamedTuple):
    """Rows of a block of columns that one program takes."""

    rows: int
    warps: int

    def launch(self, block: int) -> dict[str, int]:
        return {"BLOCK": block, "ROWS": self.rows, "num_warps": min(self.warps, MAX_WARPS)}


class LoraTile(NamedTuple):
    """Of an adapter's products of one row: rows and columns of A that one program multiplies, and
    elements of B.
    """

    thin: int
    inputs: int
    warps: int
    products: int
    expand_warps: int


class AttentionTile(NamedTuple):
    """A tile of paged attention: query rows (of a sequence's new tokens if 0), keys per step, and
    programs per multiprocessor up to which the keys of a sequence are split.

    registers  the maximum per thread, so that more programs run at once; None is no limit
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None
