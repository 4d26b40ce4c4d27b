"""The mask of the tokens that a step may sample: of grammars, allowed_token_ids and bad_words."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from atomc.runtime.constrained.allowed_tokens import AllowedTokens, BadWord
from atomc.runtime.constrained.grammar_compiler import full_mask
from atomc.runtime.constrained.request_state import RequestState
from atomc.runtime.constrained.structured_outputs import StructuredMatchers
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.request_errors import RequestErrors
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer

# AllowedTokens that are kept: the choices of a request, and prompts of one batch, share them.
NUM_KEPT = 16


@dataclass(eq=False)
class TokenMasks:
    """Creates the masks of steps.

    vocab_size       None: unknown, such requests are refused
    request_errors   collects the errors of single requests
    """

    structured_outputs: StructuredMatchers
    tokenizer: "Tokenizer | None"
    vocab_size: int | None
    request_errors: RequestErrors

    def __post_init__(self) -> None:
        self._kept = lru_cache(NUM_KEPT)(self._create)

    def allowed_tokens(self, params: SamplingParams) -> AllowedTokens | None:
        """Those of the request; None: all. Raises ValueError if there are none, or if they cannot
        be found.
        """
        if params.allowed_token_ids is None and not params.bad_words:
            return None
        return self._kept(params.allowed_token_ids, params.bad_words)

    def _create(
        self, allowed_token_ids: tuple[int, ...] | None, bad_words: tuple[BadWord, ...]
    ) -> AllowedTokens:
        if self.vocab_size is None:
            raise ValueError(
                "allowed_token_ids and bad_words need the size of the vocabulary, which this "
                "module does not have as config.vocab_size: use logit_bias"
            )
        params = SamplingParams(allowed_token_ids=allowed_token_ids, bad_words=bad_words)
        return AllowedTokens(params, self.vocab_size, self.tokenizer)

    def mask(
        self,
        step: ScheduledStep,
        states: Mapping[str, RequestState],
        requests: Mapping[str, Request],
    ) -> Tensor | None:
        """The mask of the step, [num_samples, W] i32 (see full_mask); None: all are allowed.

        states, requests   by id. Where a state's mask depends on the output, the request has all
                           tokens before the step
        """
        matchers = {
            name: state.matcher for name, state in states.items() if state.matcher is not None
        }
        mask = self.structured_outputs.mask(step, matchers)
        if all(state.allowed is None for state in states.values()):
            return mask
        if mask is None:
            assert self.vocab_size is not None, "allowed_tokens refuses these requests"
            mask = full_mask(step.num_samples, self.vocab_size)
        bits, row = mask.numpy().view(np.uint32), 0
        for chunk in step.chunks:
            rows = bits[row : row + chunk.num_samples]
            row += chunk.num_samples
            state = states.get(chunk.request_id)
            if chunk.num_samples and state is not None and state.allowed is not None:
                self.request_errors.run(
                    chunk.request_id,
                    "excluding its tokens",
                    _exclude,
                    state.allowed,
                    rows,
                    chunk,
                    requests[chunk.request_id],
                )
        return mask


def _exclude(
    allowed: AllowedTokens, rows: "np.typing.NDArray[np.uint32]", chunk: Chunk, request: Request
) -> None:
    start = max(len(request.tokens) - allowed.num_context, request.num_prompt)
    allowed.exclude(rows, request.tokens[start:], chunk.draft)
