"""From the scheduler's decision to the tensors of one step.

T rows (new tokens, and padding behind them), S sequences, R rows of which logits are wanted, B blocks of the longest.
"""

from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from atomc.ops import GroupStep, Step
from atomc.runtime.scheduler import ScheduledStep


def step_tensors(
    step: ScheduledStep, *, num_groups: int = 1, device: torch.device | str = "cpu", num_rows: int = 0
) -> Step:  # fmt: skip
    """The Step of a decision. Rows lie sequence after sequence; all groups share slots and block tables.

    num_rows > T pads to so many rows. A padding row has token 0 at position 0, slot -1, and belongs to no sequence:
    it lies beyond query_start[-1].
    """
    counts = np.array([len(chunk.tokens) for chunk in step.chunks])
    starts = np.array([chunk.start for chunk in step.chunks])
    query_start = np.concatenate(([0], counts.cumsum()))
    T = int(query_start[-1])
    input_ids = np.fromiter(chain.from_iterable(chunk.tokens for chunk in step.chunks), np.int64, T)
    positions = np.arange(T) + np.repeat(starts - query_start[:-1], counts)

    block_tables = np.zeros((len(step.chunks), max(len(chunk.blocks) for chunk in step.chunks)), np.int32)
    for table, chunk in zip(block_tables, step.chunks, strict=True):
        table[: len(chunk.blocks)] = chunk.blocks
    sequence = np.repeat(np.arange(len(step.chunks)), counts)
    block, offset = np.divmod(positions, step.block_size)
    slots = block_tables[sequence, block].astype(np.int64) * step.block_size + offset

    yields_token = np.array([chunk.draw is not None for chunk in step.chunks])
    padding = max(num_rows - T, 0)

    def tensor(values: npt.NDArray[np.generic], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    group = GroupStep(
        slots=tensor(np.pad(slots, (0, padding), constant_values=-1), torch.int64),
        block_tables=tensor(block_tables, torch.int32),
        # No spec of kind "recurrent" or "conv" reaches the runner, so that nobody reads these.
        state_slots=torch.zeros(len(step.chunks), dtype=torch.int64, device=device),
    )
    return Step(
        input_ids=tensor(np.pad(input_ids, (0, padding)), torch.int64),
        positions=tensor(np.pad(positions, (0, padding)), torch.int64),
        query_start=tensor(query_start, torch.int32),
        seq_lens=tensor(starts + counts, torch.int32),
        logits_rows=tensor(query_start[1:][yields_token] - 1, torch.int64),
        groups=(group,) * num_groups,
    )
