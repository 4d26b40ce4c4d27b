"""CUDA graphs of whole steps, one per program and shape, in one memory pool.

A decode step has one row per sequence, or 1 + k with drafts of k tokens. Other steps (prefill, and
prefill mixed with decode) are padded to the next captured numbers of rows and of sequences.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from atomc.replay.cudagraphs import CapturedCall, Pool
from atomc.report.report import Report
from atomc.runtime.execution.input_batch import StepShape

MOST_PREFILL_ROWS = 2048  # larger steps take longer on the device than their launch on the host
# Of mixed steps. Tiles of a product have up to 128 rows; logits of max_num_seqs sequences cost as
# much as some layers.
MIXED_ROWS = (64, *range(128, MOST_PREFILL_ROWS + 1, 128))
MIXED_SEQUENCES = (8, 64, 256)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def step_shapes(
    max_num_seqs: int, max_num_rows: int, columns: int, drafts: int = 0, *, rewinds: bool = False
) -> list[StepShape]:
    """Shapes to capture: decode steps, decode steps with drafts, then mixed steps up to the token
    budget.

    rewinds   the tokens after a rejected draft are computed again: up to `drafts` of a sequence,
              besides its next draft
    """
    most = min(max_num_rows, MOST_PREFILL_ROWS)
    mixed = [*[rows for rows in MIXED_ROWS if rows < most], most]
    counts = [*[count for count in MIXED_SEQUENCES if count < max_num_seqs], max_num_seqs]
    sizes = [size for size in decode_sizes(max_num_seqs) if size <= max_num_rows]
    decode = [StepShape(size, size, size, columns) for size in sizes]
    drafted = [
        StepShape(size * (again + 1 + drafts), size, size * (1 + drafts), columns)
        for again in ((0, drafts) if rewinds else (0,))
        for size in sizes
        if drafts and size * (again + 1 + drafts) <= max_num_rows
    ]
    others = [
        StepShape(rows, _uneven(rows, count), min(rows, count * (1 + drafts)), columns)
        for rows in mixed
        for count in sorted({min(count, rows) for count in counts})
    ]
    # The largest of a kind first: smaller ones reuse its memory.
    return [*decode[::-1], *drafted[::-1], *others[::-1]]


def shapes_for_later(shapes: Sequence[StepShape]) -> list[StepShape]:
    """All but the largest and the smallest shape of each kind: with these, any step that is to have
    a graph has one, and the other graphs reuse most of their memory.
    """
    kinds = defaultdict[int, list[StepShape]](list)
    for shape in sorted(shapes):
        kinds[shape.rows // shape.sequences if shape.is_decode else 0].append(shape)
    ends = {one for of_kind in kinds.values() for one in (of_kind[0], of_kind[-1])}
    return [shape for shape in shapes if shape not in ends]


def smallest_shape(
    shapes: Iterable[StepShape], rows: int, sequences: int, wanted: int, longest: int
) -> StepShape | None:
    """The first of these shapes, in ascending order, for such a step, or None. longest: maximum
    rows of one sequence.
    """
    return next(
        (
            shape
            for shape in shapes
            if shape.rows >= rows
            and shape.sequences >= sequences
            and shape.wanted >= wanted
            and (shape.rows % shape.sequences or longest <= shape.rows // shape.sequences)
        ),
        None,
    )


def launched_shapes(
    max_num_seqs: int, max_num_rows: int, columns: int, drafts: int = 0, *, rewinds: bool = False
) -> list[StepShape]:
    """Shapes that together launch every kernel variant a step may need, the largest first.

    Variants change at powers of two, so one shape between two powers is enough; a long prompt alone
    is split differently from all captured steps.
    """
    largest = StepShape(
        max_num_rows, _uneven(max_num_rows, max_num_seqs), min(max_num_rows, max_num_seqs), columns
    )
    shapes = [
        shape
        for shape in step_shapes(max_num_seqs, max_num_rows, columns, drafts, rewinds=rewinds)
        if shape.rows == max_num_seqs or _power_of_two(shape.rows)
    ]
    # The largest may be among them, and a launch takes as long as a step of the host.
    return list(dict.fromkeys([largest, StepShape(max_num_rows, 1, 1, columns), *shapes]))


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _uneven(rows: int, sequences: int) -> int:
    """The smallest number >= sequences that does not divide rows: kernels recognize decode steps by
    equal numbers of rows per sequence.
    """
    while rows % sequences == 0 and rows > 1:
        sequences += 1
    return sequences


class StepGraphs:
    """One CUDA graph per shape; `call(shape)` runs the step in the static input tensors.

    shapes           to capture now; `capture` adds others, between steps
    pool             of all graphs of a runner, of which one runs at a time
    budget           maximum bytes of the pool; further shapes are not captured, with a note
    agree            the memory left in the budget of all processes that capture the same graphs
    kernels_loaded   all kernels of these steps are compiled and loaded: only the first shape is run
                     before it is captured

    captured   in ascending order
    """

    def __init__(
        self,
        call: Callable[[StepShape], Tensor],
        shapes: Sequence[StepShape],
        report: Report,
        *,
        pool: Pool,
        budget: int | None = None,
        agree: Callable[[int], int] = lambda left: left,
        kernels_loaded: bool = False,
    ):
        self.captured: dict[StepShape, CapturedCall[Tensor]] = {}
        self._call, self._report, self._pool, self._budget = call, report, pool, budget
        self._agree, self._kernels_loaded = agree, kernels_loaded
        try:
            for shape in shapes:
                self.capture(shape)
        except BaseException:
            # The traceback holds them, and NCCL ends a group only after its last graph.
            self.captured.clear()
            raise

    def capture(self, shape: StepShape) -> None:
        """Capture a graph of this shape, unless the budget is used up."""
        if self._budget is not None and self._agree(self._budget - self._pool.bytes) <= 0:
            size = f"{self._pool.bytes / 2**20:.0f} MiB"
            note = f"CUDA graphs beyond {size} are left out: raise gpu_memory_utilization"
            if note not in self._report.notes:
                self._report.notes.append(note)
            return
        warm_up = not (self._kernels_loaded and self.captured)
        with torch.no_grad():
            graph = self._pool.capture(partial(self._call, shape), warm_up=warm_up)
        self.captured = dict(sorted([*self.captured.items(), (shape, graph)]))
        self._report.cuda_graphs.append(
            {"rows": shape.rows, "sequences": shape.sequences, "bytes": graph.bytes}
        )

    def shape_for(self, rows: int, sequences: int, wanted: int, longest: int) -> StepShape | None:
        """The smallest captured shape for such a step, or None."""
        return smallest_shape(self.captured, rows, sequences, wanted, longest)

    def __call__(self, shape: StepShape) -> Tensor:
        """Logits [R, V] of the step in the static input tensors; the next call overwrites them."""
        logits: Tensor = self.captured[shape].replay()
        return logits
