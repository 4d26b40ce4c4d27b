"""The grid of every kernel, every case and every dtype, and which cells of it run per change.

Fixed: each case of each kernel in one dtype, by turns, of those that the kernel takes; of the cases
of one long shape, a kernel runs one. Drawn: a few of the others, by a seed. All of them run under
`make test-all`, and on a GPU under `make test-gpu`.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from refusals import refusal_text

from atomc import kernels, ops
from atomc.platform import Platform

for provider in kernels.PROVIDERS:
    kernels.load(provider)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = [kernel for op in ops.REGISTRY.values() for kernel in op.kernels]
TRIED = [
    kernel for kernel in KERNELS if kernel.provider != "aiter"
]  # AITER's are tried in tests/kernels/aiter
# Shapes of hundreds of programs, which the interpreter runs one after another: 1 to 10 seconds
# where others take 0.05.
LONG = frozenset({"many", "many rows", "many tokens", "several tiles", "every size"})
DRAWN = 0.01


class Cell(NamedTuple):
    kernel: ops.Kernel
    case: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{name_of(self.kernel)}-{self.case}-{str(self.dtype).removeprefix('torch.')}"

    def taken(self) -> bool:
        """Whether the kernel takes it on the CPU or the GPU that its provider is for, be that here
        or not.
        """
        platform = (
            Platform.named("h200")
            if self.kernel.provider in ("triton", "cuda")
            else Platform.detect("cpu")
        )
        arguments = CASES[self.kernel.op][self.case](
            Draw(self.dtype, layout=self.kernel.layout or "paged")
        )
        return refusal_text(self.kernel, platform, arguments) is None


def name_of(kernel: ops.Kernel) -> str:
    return "-".join(part for part in (kernel.op, kernel.provider, kernel.layout) if part)


def shape(case: str) -> str:
    """The long shape that a case shares with others, or the case."""
    return next((part for part in case.split(", ") if part in LONG), case)


def cells_of(kernel: ops.Kernel) -> list[Cell]:
    return [Cell(kernel, case, dtype) for case in CASES[kernel.op] for dtype in DTYPES]


def fixed(kernel: ops.Kernel) -> list[Cell]:
    """The cells of a kernel that run per change, whatever is drawn."""
    shapes: dict[str, list[Cell]] = {}
    for cell in cells_of(kernel):
        shapes.setdefault(shape(cell.case), []).append(cell)
    chosen = []
    for turn, cells in enumerate(shapes.values()):
        taken = [cell for cell in cells if cell.taken()] or cells
        chosen.append(taken[turn % len(taken)])
    return chosen


def grid(seed: int, kernels: Sequence[ops.Kernel] = TRIED) -> list[tuple[Cell, bool]]:
    """Every cell, and whether it runs per change."""
    draw, cells = random.Random(seed), []
    for kernel in kernels:
        always = {(cell.case, cell.dtype) for cell in fixed(kernel)}
        cells += [
            (cell, (cell.case, cell.dtype) in always or draw.random() < DRAWN)
            for cell in cells_of(kernel)
        ]
    return cells
