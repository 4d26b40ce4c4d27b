"""How likely tokens were, on the device: log-softmax of rows of the model's logits.

L rows of which that is asked, N the most likely tokens of each, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.runtime.sampling.logprobs import TokenLogprobs

# Rows whose log-softmax, of the size of V, exists at the same time.
ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Logprobs:
    """TokenLogprobs of several rows, on the device, in one tensor that can be copied to the host.

    table    [L, 3 + 2 * N] f64: token, value, rank, the most likely tokens, their values
    counts   how many of the most likely each row asked for
    """

    table: Tensor
    counts: tuple[int, ...]

    def rows(self, table: Tensor) -> "list[LogprobsRow]":
        """One for each row, from a copy of the table; waits for the device if it lies there."""
        return [
            LogprobsRow(values, count)
            for values, count in zip(table.tolist(), self.counts, strict=True)
        ]

    def read(self, table: Tensor) -> list[TokenLogprobs]:
        return [row.read() for row in self.rows(table)]


@dataclass(frozen=True)
class LogprobsRow:
    """A row of the table, on the host."""

    values: Sequence[float]
    count: int

    def read(self) -> TokenLogprobs:
        token, value, rank, *tops = self.values
        top = zip(map(int, tops[: self.count]), tops[len(tops) // 2 :], strict=False)
        return TokenLogprobs(int(token), value, int(rank), tuple(top))


def logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> Logprobs:
    """Of tokens [L] i64 in the rows of logits [L, V], with the counts[i] most likely ones of row
    i.
    """
    num_top = min(max(counts, default=0), logits.shape[-1])
    parts = [
        _table(rows, ids[:, None], num_top)
        for rows, ids in zip(
            torch.split(logits, ROWS_AT_ONCE), torch.split(tokens, ROWS_AT_ONCE), strict=True
        )
    ]
    table = parts[0] if len(parts) == 1 else torch.cat(parts)
    return Logprobs(table, tuple(min(count, num_top) for count in counts))


def _table(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    all_values = logits.float().log_softmax(-1)
    values = all_values.gather(-1, tokens)
    ranks = (all_values > values).sum(-1, keepdim=True) + 1
    top = all_values.topk(num_top, dim=-1)
    return torch.cat(
        [part.double() for part in (tokens, values, ranks, top.indices, top.values)], -1
    )
