"""How likely tokens were, on the device: log-softmax of rows of the model's logits.

L rows of which that is asked, N the most likely tokens of each, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.runtime.logprobs import TokenLogprobs

# Rows whose log-softmax, of the size of V, exists at the same time.
ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Logprobs:
    """TokenLogprobs of several rows, on the device; `counts` says how many of the most likely each row asked for."""

    tokens: Tensor  # [L] i64
    values: Tensor  # [L] f32
    ranks: Tensor  # [L] i64
    top_tokens: Tensor  # [L, N] i64
    top_values: Tensor  # [L, N] f32
    counts: tuple[int, ...]

    def on_host(self) -> list[TokenLogprobs]:
        """One for each row; waits for the device."""
        columns = zip(self.tokens.tolist(), self.values.tolist(), self.ranks.tolist(), self.top_tokens.tolist(),
                      self.top_values.tolist(), self.counts, strict=True)  # fmt: skip
        return [TokenLogprobs(token, value, rank, tuple(zip(ids[:count], tops[:count], strict=True)))
                for token, value, rank, ids, tops, count in columns]  # fmt: skip


def logprobs(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> Logprobs:
    """Of tokens [L] i64 in the rows of logits [L, V], with the counts[i] most likely ones of row i."""
    num_top = min(max(counts, default=0), logits.shape[-1])
    parts = [_logprobs(rows, ids, num_top) for rows, ids in
             zip(torch.split(logits, ROWS_AT_ONCE), torch.split(tokens, ROWS_AT_ONCE), strict=True)]  # fmt: skip
    whole = parts[0] if len(parts) == 1 else tuple(torch.cat(part) for part in zip(*parts, strict=True))
    values, ranks, top_tokens, top_values = whole
    return Logprobs(tokens, values, ranks, top_tokens, top_values, tuple(min(count, num_top) for count in counts))


def _logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    all_values = logits.float().log_softmax(-1)
    values = all_values.gather(-1, tokens[:, None])
    ranks = (all_values > values).sum(-1) + 1
    top = all_values.topk(num_top, dim=-1)
    return values[:, 0], ranks, top.indices, top.values
