"""CUDA graphs of the decode step: one per batch size, on static buffers of the largest.

S sequences of one new token each, B blocks a sequence.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from atomc.cudagraphs import Captured, Pool
from atomc.ops import GroupStep, Step
from atomc.program import Program


def default_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 64, of 16 up to 256, of 64 beyond."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(320, max_num_seqs + 64, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The decode step of a program for batches up to max(sizes), captured once per size.

    max_blocks   block-table columns: the blocks of the longest sequence
    A padding sequence has no row: query_start stays at the number of rows, its slot is -1.
    """

    def __init__(self, program: Program, sizes: Sequence[int], *, max_blocks: int, num_groups: int = 1,
                 progress: bool = True):  # fmt: skip
        most, device = max(sizes), program.device
        self.program, self.sizes = program, sorted(sizes)
        zeros = partial(torch.zeros, device=device, dtype=torch.int64)
        self.step = Step(
            input_ids=zeros(most),
            positions=zeros(most),
            query_start=torch.arange(most + 1, device=device, dtype=torch.int32),
            seq_lens=torch.ones(most, device=device, dtype=torch.int32),
            logits_rows=torch.arange(most, device=device),
            groups=tuple(
                GroupStep(zeros(most) - 1,
                          torch.zeros(most, max_blocks, device=device, dtype=torch.int32),
                          zeros(most))
                for _ in range(num_groups)
            ),
        )  # fmt: skip
        self.captured: dict[int, Captured] = {}
        pool = Pool(device)
        # The largest first: the smaller ones then fit into the memory it took.
        for size in tqdm(self.sizes[::-1], desc="capturing", unit="graph", disable=None if progress else True):
            view = self.view(size)
            with torch.no_grad():
                self.captured[size] = pool.capture(partial(program, view))
            program.report.cuda_graphs.append({"tokens": size, "bytes": self.captured[size].bytes})

    def view(self, size: int) -> Step:
        """The first `size` sequences of the static buffers."""
        s = self.step
        groups = tuple(GroupStep(g.slots[:size], g.block_tables[:size], g.state_slots[:size]) for g in s.groups)
        return Step(s.input_ids[:size], s.positions[:size], s.query_start[:size + 1], s.seq_lens[:size],
                    s.logits_rows[:size], groups)  # fmt: skip

    def fits(self, step: Step) -> bool:
        """Whether a graph serves this step: one new token for every sequence, and not too many."""
        count = len(step.seq_lens)
        narrow = all(g.block_tables.shape[1] <= self.step.groups[0].block_tables.shape[1] for g in step.groups)
        return len(step.input_ids) == count == len(step.logits_rows) and count <= self.sizes[-1] and narrow

    def __call__(self, step: Step) -> Tensor:
        """Logits [S, V]; they are overwritten by the next call."""
        count = len(step.seq_lens)
        size = next(size for size in self.sizes if size >= count)
        mine = self.view(size)
        for name in ("input_ids", "positions", "seq_lens"):
            getattr(mine, name)[:count].copy_(getattr(step, name), non_blocking=True)
        mine.query_start[:count + 1].copy_(step.query_start, non_blocking=True)
        mine.query_start[count + 1:].fill_(count)
        mine.seq_lens[count:].zero_()
        for group, given in zip(mine.groups, step.groups, strict=True):
            group.slots[:count].copy_(given.slots, non_blocking=True)
            group.slots[count:].fill_(-1)
            group.block_tables[:count, : given.block_tables.shape[1]].copy_(given.block_tables, non_blocking=True)
        logits: Tensor = self.captured[size].replay()
        return logits[:count]
