"""Log-probabilities on the device: log-softmax of rows of the model's logits.

L rows with logprobs, N most likely tokens per row, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.runtime.requests.request import TokenLogprobs

# Rows of [V] fp32 log-softmax in memory at a time.
ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Logprobs:
    """TokenLogprobs of several rows as one tensor on the device.

    table    [L, 3 + 2 * N] f64: token, logprob, rank, N most likely tokens, their logprobs
    counts   number of most likely tokens that each row requested
    """

    table: Tensor
    counts: tuple[int, ...]

    def rows(self, table: Tensor) -> "list[LogprobsRow]":
        """One per row of the table; waits for the device if the table is there."""
        return [
            LogprobsRow(values, count)
            for values, count in zip(table.tolist(), self.counts, strict=True)
        ]


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
    """Log-probabilities of tokens [L] i64 in logits [L, V], with counts[i] most likely tokens of
    row i.
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
