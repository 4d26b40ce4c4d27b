"""From logits to tokens, on the device of the logits.

R rows, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atomc.runtime.sampling.inverse_transform import inverse_transform
from atomc.runtime.sampling.logprobs import TokenLogprobs
from atomc.runtime.sampling.pack_to_device import pack_to_device
from atomc.runtime.sampling.row_logprobs import Logprobs, logprobs
from atomc.runtime.sampling.sample_spec import SampleSpec, uniform
from atomc.runtime.sampling.token_counts import TokenCounts


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens [R] i64, on the device, and how likely those of `rows` were.

    tops   the largest logit of each row [R], after penalties, bias and mask; where it is not
           finite, nothing could be drawn, and the token is any id
    """

    tokens: Tensor
    tops: Tensor
    rows: tuple[int, ...] = ()
    logprobs: Logprobs | None = None

    def token_logprobs(self, table: Tensor | None = None) -> list[TokenLogprobs | None]:
        """One for each row, None where it was not asked for; from a copy of logprobs.table, or
        waiting for the device.
        """
        found: list[TokenLogprobs | None] = [None] * len(self.tokens)
        if self.logprobs is not None:
            values = self.logprobs.read(self.logprobs.table if table is None else table)
            for row, value in zip(self.rows, values, strict=True):
                found[row] = value
        return found


class Sampler:
    """Draws tokens for up to max_num_seqs requests, and counts those of requests with penalties."""

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self.counts = TokenCounts(device, max_num_seqs)

    def __call__(
        self, logits: Tensor, draws: Sequence[SampleSpec], *, mask: Tensor | None = None
    ) -> Sampled:
        """Row i of logits [R, V] drawn as draws[i] says, whatever the other rows are.

        Greedy rows are the exact argmax, the smallest id among equals. Where bit t % 32 of mask[i,
        t // 32] is 0, row i does not draw token t; mask [R, W] i32 may lie on the host. Rows of one
        request with a draft (see atomc.runtime.speculative) lie behind each other.
        """
        sampled = self.sample(logits, draws, mask=mask)
        penalized = [i for i, draw in enumerate(draws) if draw.params.penalized]
        guessed = any(draws[i].draft for i in penalized)
        self.counts.add(
            penalized,
            [draws[i] for i in penalized],
            sampled.tokens,
            _right(draws, sampled.tokens) if guessed else None,
        )
        return sampled

    def sample(
        self, logits: Tensor, draws: Sequence[SampleSpec], *, mask: Tensor | None = None
    ) -> Sampled:
        """The same without counting the tokens, so that it may be repeated."""
        numbers = uniform([draw.seed for draw in draws], [draw.index for draw in draws])
        changed = self._changed(logits, draws, mask)
        tokens, tops = inverse_transform(changed, [draw.params for draw in draws], numbers)
        asked = [i for i, draw in enumerate(draws) if draw.params.logprobs is not None]
        if not asked:
            return Sampled(tokens, tops)
        counts = [draws[i].params.logprobs or 0 for i in asked]
        if len(asked) == len(draws):
            return Sampled(tokens, tops, tuple(asked), logprobs(logits, tokens, counts))
        rows = pack_to_device(logits.device, [(i,) for i in asked])[0, :, 0].long()
        return Sampled(tokens, tops, tuple(asked), logprobs(logits[rows], tokens[rows], counts))

    def _changed(self, logits: Tensor, draws: Sequence[SampleSpec], mask: Tensor | None) -> Tensor:
        """Logits after penalties, bias, bans and mask: the same tensor if there are none."""
        penalized = [i for i, draw in enumerate(draws) if draw.params.penalized]
        # A ban is a bias, too, and comes after that of the user.
        V = logits.shape[-1]
        biases = [
            (i * V + token, bias)
            for i, draw in enumerate(draws)
            if draw.params.logit_bias or draw.params.min_tokens
            for token, bias in {
                **draw.params.logit_bias,
                **dict.fromkeys(draw.banned, -torch.inf),
            }.items()
            if token < V
        ]
        if not (penalized or biases or mask is not None):
            return logits
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if penalized:
            self.counts.penalize(logits, penalized, [draws[i] for i in penalized])
        if biases:
            place, bias = pack_to_device(logits.device, biases)[..., 0]
            logits.view(-1).scatter_add_(0, place.long(), bias.float())
        if mask is not None:
            logits.masked_fill_(~allowed(mask.to(logits.device, non_blocking=True), V), -torch.inf)
        return logits


def allowed(mask: Tensor, V: int) -> Tensor:
    """The bits of mask [R, W] i32 as bools [R, V]."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[..., None] >> bits) & 1).flatten(-2)[:, :V].bool()


def _right(draws: Sequence[SampleSpec], tokens: Tensor) -> Tensor:
    """Which rows come after right guesses only, [R] bool."""
    right = torch.ones_like(tokens, dtype=torch.bool)
    for depth in range(1, 1 + max(len(draw.draft) for draw in draws)):
        guesses = [(i, draw.draft[-1]) for i, draw in enumerate(draws) if len(draw.draft) == depth]
        row, guess = pack_to_device(tokens.device, guesses)[..., 0].long()
        right[row] = right[row - 1] & (tokens[row - 1] == guess)
    return right
