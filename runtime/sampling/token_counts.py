"""Token counts of requests with penalties, on the device.

R rows, P requests with penalties, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atomc.runtime.requests.sample_spec import RequestCounts, SampleSpec
from atomc.runtime.sampling.pack_to_device import pack_to_device


class TokenCounts:
    """Counts of output tokens and a mask of prompt tokens, for at most max_num_seqs requests.

    Sampled tokens are counted on the device, without waiting for them.
    """

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.free: list[int] = []
        self.output = torch.zeros((0, 0), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((0, 0), dtype=torch.bool, device=device)

    def release(self, counts: RequestCounts) -> None:
        """Free the row of a request."""
        if counts.row is not None:
            self.free.append(counts.row)
            counts.row = None

    def penalize(self, logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]) -> None:
        """Apply the penalties of specs[i] to row rows[i] of logits [R, V] f32, in place."""
        if not len(self.output):
            self.output, self.prompt = (
                values.new_zeros((0, logits.shape[-1])) for values in (self.output, self.prompt)
            )
        assigned = [self._row(spec) for spec in specs]
        params = [spec.params for spec in specs]
        row, slot, repetition, presence, frequency = pack_to_device(
            self.device,
            [
                (row, slot, of.repetition_penalty, of.presence_penalty, of.frequency_penalty)
                for row, slot, of in zip(rows, assigned, params, strict=True)
            ],
        )
        index, slots = row[:, 0].long(), slot[:, 0].long()
        counts = self._counts_of(slots, specs)
        # Skip penalties that no request uses.
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

    def _counts_of(self, slots: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        """A copy of rows slots[i] of the output counts, including the drafts of specs[i]."""
        counts = self.output[slots]
        drafted = [(i, token) for i, spec in enumerate(specs) for token in spec.draft]
        if drafted:
            i, token = pack_to_device(self.device, drafted)[..., 0].long()
            _count(counts, i, token)
        return counts

    def add(
        self,
        rows: Sequence[int],
        specs: Sequence[SampleSpec],
        tokens: Tensor,
        accepted: Tensor | None = None,
    ) -> None:
        """Count tokens[rows[i]], sampled by specs[i]. accepted [R] bool: rows to count."""
        if not rows:
            return
        row, slot = pack_to_device(
            self.device,
            [(row, _counts(spec).assigned_row) for row, spec in zip(rows, specs, strict=True)],
        )[..., 0].long()
        _count(self.output, slot, tokens[row], None if accepted is None else accepted[row])
        for spec in specs:
            counts = _counts(spec)
            if not spec.draft:
                counts.length, counts.pending = spec.length + 1, 0
            else:
                counts.pending = max(counts.pending, len(spec.draft))

    def _row(self, spec: SampleSpec) -> int:
        """The row of the request; it has counted the tokens before this spec and its draft."""
        counts, length = _counts(spec), spec.length - len(spec.draft)
        if not counts.length:
            self._make(counts, length)
        assert counts.length <= length <= counts.length + counts.pending, (
            f"{counts} does not match {length} tokens"
        )
        counts.length, counts.pending = length, 0
        return counts.assigned_row

    def _make(self, counts: RequestCounts, length: int) -> None:
        assert len(counts.tokens) == length, (
            f"{len(counts.tokens)} of {length} tokens are known on the host"
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
        """An unused row; grows the tensors if there is none."""
        if not self.free:
            old = len(self.output)
            new = min(max(2 * old, 4), self.max_num_seqs)
            assert new > old, f"all {old} rows are in use"
            self.output = _longer(self.output, new)
            self.prompt = _longer(self.prompt, new)
            self.free.extend(range(old, new))
        return self.free.pop()


def _counts(spec: SampleSpec) -> RequestCounts:
    assert spec.counts is not None, f"{spec}: penalties need counts"
    return spec.counts


def _count(counts: Tensor, rows: Tensor, tokens: Tensor, where: Tensor | None = None) -> None:
    """Add 1 at counts[rows[i], tokens[i]], where `where` is true; indices may repeat."""
    ones = torch.ones_like(tokens, dtype=torch.int32) if where is None else where.int()
    counts.view(-1).scatter_add_(0, rows * counts.shape[-1] + tokens, ones)


def _longer(values: Tensor, num_rows: int) -> Tensor:
    return torch.cat([values, values.new_zeros((num_rows - len(values), values.shape[-1]))])
