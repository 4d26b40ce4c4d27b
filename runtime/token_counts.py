"""How often each request's tokens came, on the device: what penalties are made of.

R rows, P requests with penalties, V vocabulary.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.runtime.columns import columns
from atomc.runtime.draw import Draw

UNKNOWN = -1  # no number of tokens


@dataclass
class _Slot:
    """Where a request's counts are, and of how many tokens: so many, or up to `open` more that the device knows."""

    row: int
    length: int
    open: int = 0

    def holds(self, length: int) -> bool:
        return self.length <= length <= self.length + self.open


class TokenCounts:
    """Counts of the output's tokens and marks of the prompt's, for at most max_num_seqs requests in a step.

    Tokens drawn on the device are counted there, so that nobody waits for them. Counts of another length than a draw
    says (the request computed tokens again, or went back) are made anew from its list of tokens.
    """

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        # The one used last is the last.
        self.slots: dict[str, _Slot] = {}
        self.free: list[int] = []
        self.output = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((0, 0), dtype=torch.bool, device=device)

    def forget(self, request_id: str) -> None:
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self.free.append(slot.row)

    def penalize(self, logits: Tensor, rows: Sequence[int], draws: Sequence[Draw], keep: Set[str]) -> None:
        """Change logits [R, V] f32 in place: its row rows[i] is penalized as draws[i] says, after its own tokens.

        Counts of the requests in `keep`, which has those of draws, are not given up for others.
        """
        if not len(self.output):
            self.output, self.prompt = (values.new_zeros((0, logits.shape[-1])) for values in (self.output, self.prompt))
        for draw in draws:
            self._fit(draw, keep)
        params = [draw.params for draw in draws]
        guesses = [(i, token) for i, draw in enumerate(draws) for token in draw.draft]
        row, slot, repetition, presence, frequency = columns(self.device, [
            (row, self.slots[draw.request_id].row, of.repetition_penalty, of.presence_penalty, of.frequency_penalty)
            for row, draw, of in zip(rows, draws, params, strict=True)
        ])  # fmt: skip
        index, slots = row[:, 0].long(), slot[:, 0].long()
        counts = self.output[slots]
        if guesses:
            i, token = columns(self.device, guesses)[..., 0].long()
            _count(counts, i, token)
        # What no request asks for costs nothing; it would change nothing either.
        values = logits if len(rows) == len(logits) else logits[index]
        if any(of.repetition_penalty != 1.0 for of in params):
            factor = torch.where((counts > 0) | self.prompt[slots], repetition.float(), 1.0)
            values.copy_(torch.where(values > 0, values / factor, values * factor))
        if any(of.frequency_penalty for of in params):
            values -= frequency.float() * counts
        if any(of.presence_penalty for of in params):
            values -= presence.float() * (counts > 0)
        if values is not logits:
            logits[index] = values

    def add(self, rows: Sequence[int], draws: Sequence[Draw], tokens: Tensor, accepted: Tensor | None = None) -> None:
        """Count tokens[rows[i]], which draws[i] drew; only where accepted [R] says so, if it is given."""
        if not rows:
            return
        row, slot = columns(self.device, [(row, self.slots[draw.request_id].row)
                                          for row, draw in zip(rows, draws, strict=True)])[..., 0].long()  # fmt: skip
        _count(self.output, slot, tokens[row], None if accepted is None else accepted[row])
        for draw in draws:
            slot_of = self.slots[draw.request_id]
            if not draw.draft:
                slot_of.length, slot_of.open = draw.length + 1, 0
            else:
                slot_of.open = max(slot_of.open, len(draw.draft))

    def _fit(self, draw: Draw, keep: Set[str]) -> None:
        """Make the request's slot hold the tokens before this draw and its draft, also if it has none yet."""
        length = draw.length - len(draw.draft)
        slot = self.slots.pop(draw.request_id, None) or _Slot(self._free_row(keep), UNKNOWN)
        self.slots[draw.request_id] = slot
        if not slot.holds(length):
            slot.length, slot.open = UNKNOWN, 0  # should `_make` raise
            self._make(slot.row, draw, length)
        slot.length, slot.open = length, 0

    def _make(self, row: int, draw: Draw, length: int) -> None:
        assert len(draw.tokens) >= length, f"{draw}: {len(draw.tokens)} of {length} tokens are known, counts need all"
        tokens = torch.tensor(draw.tokens[:length], dtype=torch.int64).to(self.device)
        prompt, output = tokens[: draw.num_prompt], tokens[draw.num_prompt :]
        self.prompt[row] = False
        self.prompt[row, prompt] = True
        self.output[row] = 0
        _count(self.output, torch.full_like(output, row), output)

    def _free_row(self, keep: Set[str]) -> int:
        """A row that no request of this step needs: more rows while few are made, then the one unused for longest."""
        if not self.free and len(self.output) < self.max_num_seqs:
            old = len(self.output)
            new = min(max(2 * old, 4), self.max_num_seqs)
            self.output = _longer(self.output, new)
            self.prompt = _longer(self.prompt, new)
            self.free.extend(range(old, new))
        if not self.free:
            self.forget(next(name for name in self.slots if name not in keep))
        return self.free.pop()


def _count(counts: Tensor, rows: Tensor, tokens: Tensor, where: Tensor | None = None) -> None:
    """Add 1 at counts[rows[i], tokens[i]], or only where it is true; a place may come several times."""
    ones = torch.ones_like(tokens, dtype=torch.int32) if where is None else where.int()
    counts.view(-1).scatter_add_(0, rows * counts.shape[-1] + tokens, ones)


def _longer(values: Tensor, num_rows: int) -> Tensor:
    return torch.cat([values, values.new_zeros((num_rows - len(values), values.shape[-1]))])
