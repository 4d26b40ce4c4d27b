"""The sampler: tokens from logits, on the device of the logits.

R rows, V vocabulary, W = ceil(V / 32) words of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atomc.runtime.requests.sample_spec import SampleSpec, uniform
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.inverse_transform import inverse_transform
from atomc.runtime.sampling.pack_to_device import pack_to_device
from atomc.runtime.sampling.row_logprobs import Logprobs, logprobs
from atomc.runtime.sampling.token_counts import TokenCounts


@dataclass(frozen=True)
class Sampled:
    """Sampled tokens [R] i64, on the device, and log-probabilities of those in `rows`.

    max_logits   the largest logit of each row [R], after penalties, bias and mask; where it is not
           finite, the row could not be sampled, and the token is meaningless
    """

    tokens: Tensor
    max_logits: Tensor
    rows: tuple[int, ...] = ()
    logprobs: Logprobs | None = None


class Sampler:
    """Samples tokens; counts the tokens of at most max_num_seqs requests with penalties."""

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self.counts = TokenCounts(device, max_num_seqs)

    def __call__(
        self, logits: Tensor, specs: Sequence[SampleSpec], *, mask: Tensor | None = None
    ) -> Sampled:
        """Sample row i of logits [R, V] according to specs[i], independently of the other rows.

        Greedy rows are the exact argmax, the smallest id among equals. Where bit t % 32 of mask[i,
        t // 32] is 0, token t is excluded from row i; mask [R, W] i32 may be on the host. Rows of
        one request with a draft (see atomc.runtime.scheduling.speculative) are adjacent.
        """
        sampled = self.sample(logits, specs, mask=mask)
        penalized = [i for i, spec in enumerate(specs) if spec.params.penalized]
        has_draft = any(specs[i].draft for i in penalized)
        self.counts.add(
            penalized,
            [specs[i] for i in penalized],
            sampled.tokens,
            _follows_accepted_draft(specs, sampled.tokens) if has_draft else None,
        )
        return sampled

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], *, mask: Tensor | None = None
    ) -> Sampled:
        """As __call__, without counting the tokens: may be repeated."""
        drawn = self.draw(
            self._processed(logits, specs, mask),
            [spec.params for spec in specs],
            [spec.seed for spec in specs],
            [spec.index for spec in specs],
        )
        asked = [i for i, spec in enumerate(specs) if spec.params.logprobs is not None]
        if not asked:
            return drawn
        tokens = drawn.tokens
        counts = [specs[i].params.logprobs or 0 for i in asked]
        scored = logits, tokens
        if len(asked) < len(specs):
            rows = pack_to_device(logits.device, [(i,) for i in asked])[0, :, 0].long()
            scored = logits[rows], tokens[rows]
        return replace(drawn, rows=tuple(asked), logprobs=logprobs(*scored, counts))

    def draw(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        indices: Sequence[int],
    ) -> Sampled:
        """Sample rows of these logits, which nothing changes; arguments as in SampleSpec, one for
        each row, or none if all are greedy.
        """
        is_random = any([of.temperature > 0 for of in params])
        numbers = uniform(seeds, indices) if is_random else np.zeros(0)
        return Sampled(*inverse_transform(logits, params, numbers))

    def _processed(
        self, logits: Tensor, specs: Sequence[SampleSpec], mask: Tensor | None
    ) -> Tensor:
        """Logits after penalties, bias, min_tokens and mask; the same tensor if there are none."""
        penalized = [i for i, spec in enumerate(specs) if spec.params.penalized]
        # min_tokens adds a bias of -inf, after the user's bias.
        V = logits.shape[-1]
        biases = [
            (i * V + token, bias)
            for i, spec in enumerate(specs)
            if spec.params.logit_bias or spec.params.min_tokens
            for token, bias in {
                **spec.params.logit_bias,
                **dict.fromkeys(spec.banned, -torch.inf),
            }.items()
            if token < V
        ]
        if not (penalized or biases or mask is not None):
            return logits
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if penalized:
            self.counts.penalize(logits, penalized, [specs[i] for i in penalized])
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


def _follows_accepted_draft(specs: Sequence[SampleSpec], tokens: Tensor) -> Tensor:
    """Whether all draft tokens before each row are accepted, [R] bool."""
    accepted = torch.ones_like(tokens, dtype=torch.bool)
    for depth in range(1, 1 + max(len(spec.draft) for spec in specs)):
        drafted = [(i, spec.draft[-1]) for i, spec in enumerate(specs) if len(spec.draft) == depth]
        row, token = pack_to_device(tokens.device, drafted)[..., 0].long()
        accepted[row] = accepted[row - 1] & (tokens[row - 1] == token)
    return accepted
