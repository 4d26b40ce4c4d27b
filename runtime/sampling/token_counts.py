"""How often each request's tokens came, on the device: what penalties are made of.

R rows, P requests with penalties, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atomc.runtime.sampling.pack_to_device import pack_to_device
from atomc.runtime.sampling.request_counts import RequestCounts
from atomc.runtime.sampling.sample_spec import SampleSpec


class TokenCounts:
    """Counts of the output's tokens and marks of the prompt's, for at most max_num_seqs requests.

    Tokens drawn on the device are counted there, so that nobody waits for them.
    """

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.free: list[int] = []
        self.output = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((0, 0), dtype=torch.bool, device=device)

    def release(self, counts: RequestCounts) -> None:
        """Another request may have its row."""
        if counts.row is not None:
            self.free.append(counts.row)
            counts.row = None

    def penalize(self, logits: Tensor, rows: Sequence[int], draws: Sequence[SampleSpec]) -> None:
        """Change logits [R, V] f32 in place: its row rows[i] is penalized as draws[i] says, after
        its own tokens.
        """
        if not len(self.output):
            self.output, self.prompt = (
                values.new_zeros((0, logits.shape[-1])) for values in (self.output, self.prompt)
            )
        places = [self._row(draw) for draw in draws]
        params = [draw.params for draw in draws]
        row, slot, repetition, presence, frequency = pack_to_device(
            self.device,
            [
                (row, place, of.repetition_penalty, of.presence_penalty, of.frequency_penalty)
                for row, place, of in zip(rows, places, params, strict=True)
            ],
        )
        index, slots = row[:, 0].long(), slot[:, 0].long()
        counts = self._counts_of(slots, draws)
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

    def _counts_of(self, slots: Tensor, draws: Sequence[SampleSpec]) -> Tensor:
        """A copy of the rows slots[i] of the output's counts, with the drafts of draws[i] counted
        as well.
        """
        counts = self.output[slots]
        guesses = [(i, token) for i, draw in enumerate(draws) for token in draw.draft]
        if guesses:
            i, token = pack_to_device(self.device, guesses)[..., 0].long()
            _count(counts, i, token)
        return counts

    def add(
        self,
        rows: Sequence[int],
        draws: Sequence[SampleSpec],
        tokens: Tensor,
        accepted: Tensor | None = None,
    ) -> None:
        """Count tokens[rows[i]], which draws[i] drew; only where accepted [R] says so, if it is
        given.
        """
        if not rows:
            return
        row, slot = pack_to_device(
            self.device, [(row, _counts(draw).place) for row, draw in zip(rows, draws, strict=True)]
        )[..., 0].long()
        _count(self.output, slot, tokens[row], None if accepted is None else accepted[row])
        for draw in draws:
            counts = _counts(draw)
            if not draw.draft:
                counts.length, counts.pending = draw.length + 1, 0
            else:
                counts.pending = max(counts.pending, len(draw.draft))

    def _row(self, draw: SampleSpec) -> int:
        """The row that counts the tokens before this draw and its draft."""
        counts, length = _counts(draw), draw.length - len(draw.draft)
        if not counts.length:
            self._make(counts, length)
        assert counts.length <= length <= counts.length + counts.pending, (
            f"{counts} are not those of {length} tokens"
        )
        counts.length, counts.pending = length, 0
        return counts.place

    def _make(self, counts: RequestCounts, length: int) -> None:
        assert len(counts.tokens) == length, (
            f"{len(counts.tokens)} of {length} tokens are known, counts need all"
        )
        row = counts.row = self._free_row() if counts.row is None else counts.row
        tokens = torch.tensor(counts.tokens, dtype=torch.int64).to(self.device)
        prompt, output = tokens[: counts.num_prompt], tokens[counts.num_prompt :]
        self.prompt[row] = False
        self.prompt[row, prompt] = True
        self.output[row] = 0
        _count(self.output, torch.full_like(output, row), output)
        counts.length, counts.tokens = length, []

    def _free_row(self) -> int:
        """A row that no request has; more rows are made as they are needed."""
        if not self.free:
            old = len(self.output)
            new = min(max(2 * old, 4), self.max_num_seqs)
            assert new > old, f"{old} requests have counts, and no more are to run at once"
            self.output = _longer(self.output, new)
            self.prompt = _longer(self.prompt, new)
            self.free.extend(range(old, new))
        return self.free.pop()


def _counts(draw: SampleSpec) -> RequestCounts:
    assert draw.counts is not None, f"{draw}: penalties need counts"
    return draw.counts


def _count(counts: Tensor, rows: Tensor, tokens: Tensor, where: Tensor | None = None) -> None:
    """Add 1 at counts[rows[i], tokens[i]], or only where it is true; a place may come several
    times.
    """
    ones = torch.ones_like(tokens, dtype=torch.int32) if where is None else where.int()
    counts.view(-1).scatter_add_(0, rows * counts.shape[-1] + tokens, ones)


def _longer(values: Tensor, num_rows: int) -> Tensor:
    return torch.cat([values, values.new_zeros((num_rows - len(values), values.shape[-1]))])
