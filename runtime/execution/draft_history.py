"""The last rows of each sequence, which several draft layers compute again: what such a layer keeps
of a row depends on tokens after it, of which some were drafts when it was computed.

A step in which drafts are rejected has rows behind the last accepted token, which nothing reads. In
the draft steps after it, the rows of its sequence are moved back: they end at this token, and begin
as many rows before the step. These are here, with their hidden states. H = 2, of a step with three
drafts, of which one is accepted:

    position    4  5  6  7  8  9
    history     x  x
    step              x  x  .  .     accepted up to 7
    draft steps x  x  x  x

T rows, S sequences, D width of the hidden states.
"""

import torch
from torch import Tensor

from atomc.ops import GroupStep, Step
from atomc.runtime.execution.input_batch import InputBatch


class DraftHistory:
    """The last H rows of each slot, `depth`: the next token and the hidden state of each."""

    def __init__(self, depth: int, batch: InputBatch, width: int, dtype: torch.dtype) -> None:
        slots, device = batch.slots + 1, batch.device
        self.depth, self._batch = depth, batch
        self._hidden = torch.zeros(slots, depth, width, dtype=dtype, device=device)
        self._tokens = torch.zeros(slots, depth, dtype=torch.int64, device=device)
        self._ends = torch.zeros(slots, dtype=torch.int64, device=device)  # the position behind

    def moved_back(self, step: Step) -> Step:
        """A draft step of InputBatch.draft_step, with the rows moved back. Keeps the last rows of
        each sequence, up to its last accepted token.
        """
        starts, stops = step.query_start[:-1].long(), step.query_start[1:].long()
        size, rows = len(starts), torch.arange(len(step.input_ids), device=starts.device)
        number = torch.searchsorted(stops, rows, right=True)
        is_row, number = number < size, number.clamp(max=size - 1)
        of_logits, drafting = number[step.logits_rows], self._batch.drafting(size)
        last = torch.cat([stops, stops[:1]]) - 1
        last = last.scatter(0, of_logits.where(drafting, size), step.logits_rows)[:-1]

        position = step.seq_lens - stops  # of row 0, if the sequence had it
        oldest = self._batch.on_device["begins"][:size]
        oldest = oldest.maximum(self._ends[step.state_slots] - self.depth)
        back = (stops - 1 - last).minimum(starts + position - oldest).clamp(min=0)
        positions = step.positions - back[number] * is_row
        tokens, hidden = self._read(step, number, positions)
        self._keep(step, last + position + 1)
        return step._replace(
            input_ids=tokens,
            hidden=hidden,
            positions=positions,
            seq_lens=step.seq_lens - back.int(),
            logits_rows=step.logits_rows + back[of_logits],
            groups=tuple(self._at(group, number, positions) for group in step.groups),
        )

    def _read(self, step: Step, number: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens [...] and hidden states [..., D] at these positions [...] of sequences
        `number` [...]: rows of the step, and before its first one of the history.
        """
        assert step.hidden is not None, "a draft step has hidden states"
        slots = step.state_slots[number]
        row = positions + (step.query_start[1:] - step.seq_lens)[number]
        in_step = row >= step.query_start[number]
        row = row.clamp(0, len(step.input_ids) - 1)
        place = slots, (positions - self._ends[slots] + self.depth).clamp(0, self.depth - 1)
        tokens = torch.where(in_step, step.input_ids[row], self._tokens[place])
        return tokens, torch.where(in_step[..., None], step.hidden[row], self._hidden[place])

    def _keep(self, step: Step, ends: Tensor) -> None:
        """Keep the rows before the positions `ends` [S]."""
        slots, depth = step.state_slots, torch.arange(-self.depth, 0, device=ends.device)
        number = torch.arange(len(ends), device=ends.device)[:, None]
        tokens, hidden = self._read(step, number.expand(-1, self.depth), ends[:, None] + depth)
        self._tokens.index_copy_(0, slots, tokens)
        self._hidden.index_copy_(0, slots, hidden)
        self._ends.index_copy_(0, slots, ends)

    def _at(self, group: GroupStep, number: Tensor, positions: Tensor) -> GroupStep:
        """The rows of these sequences at these positions."""
        size = self._batch.block_size
        blocks = group.block_tables[number, positions // size]
        slots = blocks * size + positions % size
        return group._replace(slots=slots.where(group.slots >= 0, -1))
