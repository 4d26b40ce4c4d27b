"""CUDA graphs of whole steps: one per number of rows, on static buffers of the largest.

A decode step has one row a sequence; other steps (a prompt, chunks of prompts, both mixed with decode) are padded to the
next captured number of rows, with room for all sequences. T rows, S sequences, R rows of which logits are wanted.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from atomc.cudagraphs import Captured, Pool
from atomc.ops import GroupStep, Step
from atomc.program import Program

Shape = tuple[int, int]  # rows, sequences
MOST_PREFILL_ROWS = 2048  # beyond, the device is busy long enough for the host to keep up


def decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def step_shapes(max_num_seqs: int, max_num_rows: int) -> list[Shape]:
    """Decode steps of every size, and mixed steps up to the token budget."""
    most = min(max_num_rows, MOST_PREFILL_ROWS)
    mixed = [rows for rows in (64, 128, *range(256, MOST_PREFILL_ROWS + 1, 256)) if rows < most] + [most]
    return [(size, size) for size in decode_sizes(max_num_seqs)] + [(rows, max_num_seqs) for rows in mixed]


class StepGraphs:
    """The steps of a program, captured once per shape.

    max_blocks   block-table columns: the blocks of the longest sequence
    A padding row has slot -1 and belongs to no sequence: query_start stays at the number of real rows. A padding
    sequence has no row and no token.
    """

    def __init__(self, program: Program, shapes: Sequence[Shape], *, max_blocks: int, num_groups: int = 1,
                 progress: bool = True):  # fmt: skip
        device = program.device
        rows, sequences = max(rows for rows, _ in shapes), max(sequences for _, sequences in shapes)
        self.shapes = sorted(shapes)
        zeros = partial(torch.zeros, device=device, dtype=torch.int64)
        counts = partial(torch.zeros, device=device, dtype=torch.int32)
        self.step = Step(
            input_ids=zeros(rows),
            positions=zeros(rows),
            query_start=counts(sequences + 1),
            seq_lens=counts(sequences),
            logits_rows=zeros(sequences),
            groups=tuple(GroupStep(zeros(rows) - 1, counts(sequences, max_blocks), zeros(sequences))
                         for _ in range(num_groups)),
        )  # fmt: skip
        self.captured: dict[Shape, Captured] = {}
        pool = Pool(device)
        # The largest first: the smaller ones then fit into the memory it took.
        for shape in tqdm(self.shapes[::-1], desc="capturing", unit="graph", disable=None if progress else True):
            with torch.no_grad():
                self.captured[shape] = pool.capture(partial(program, self.view(shape)))
            program.report.cuda_graphs.append({"rows": shape[0], "sequences": shape[1],
                                               "bytes": self.captured[shape].bytes})  # fmt: skip

    def view(self, shape: Shape) -> Step:
        """The first rows and sequences of the static buffers."""
        rows, sequences = shape
        s = self.step
        groups = tuple(GroupStep(g.slots[:rows], g.block_tables[:sequences], g.state_slots[:sequences])
                       for g in s.groups)  # fmt: skip
        return Step(s.input_ids[:rows], s.positions[:rows], s.query_start[: sequences + 1], s.seq_lens[:sequences],
                    s.logits_rows[:sequences], groups)  # fmt: skip

    def shape_for(self, step: Step) -> Shape | None:
        """The smallest captured shape that holds this step, or None."""
        rows, sequences = len(step.input_ids), len(step.seq_lens)
        room = self.step.groups[0].block_tables.shape[1]
        if any(group.block_tables.shape[1] > room for group in step.groups):
            return None
        decode = rows == sequences == len(step.logits_rows)
        return next((shape for shape in self.shapes if shape[0] >= rows and shape[1] >= sequences
                     and (shape[0] > shape[1] or decode)), None)  # fmt: skip

    def __call__(self, step: Step, shape: Shape) -> Tensor:
        """Logits [R, V] of the step; they are overwritten by the next call."""
        mine = self.view(shape)
        rows, sequences, wanted = len(step.input_ids), len(step.seq_lens), len(step.logits_rows)
        for buffer, given in ((mine.input_ids, step.input_ids), (mine.positions, step.positions),
                              (mine.seq_lens, step.seq_lens), (mine.query_start, step.query_start),
                              (mine.logits_rows, step.logits_rows)):  # fmt: skip
            buffer[: len(given)].copy_(given, non_blocking=True)
        mine.query_start[sequences + 1 :].fill_(rows)
        mine.seq_lens[sequences:].zero_()
        for group, new in zip(mine.groups, step.groups, strict=True):
            group.slots[:rows].copy_(new.slots, non_blocking=True)
            group.slots[rows:].fill_(-1)
            group.block_tables[:sequences, : new.block_tables.shape[1]].copy_(new.block_tables, non_blocking=True)
        logits: Tensor = self.captured[shape].replay()
        return logits[:wanted]
