"""The mask of the tokens that a step may sample: of grammars, allowed_token_ids, bad_words, and
budgets of reasoning.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from atomc.runtime.constrained.allowed_tokens import AllowedTokens, BadWord
from atomc.runtime.constrained.grammar_compiler import full_mask
from atomc.runtime.constrained.reasoning_budget import ReasoningBudget, reasoning_budget
from atomc.runtime.constrained.request_state import RequestState
from atomc.runtime.constrained.structured_outputs import MaskedRows, StructuredMatchers
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.request_errors import RequestErrors
from atomc.runtime.requests.sampling_params import SamplingParams

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

    def reasoning_budget(self, request: Request) -> ReasoningBudget | None:
        """That of the request; None: it has none. Raises ValueError for a model without tags."""
        return reasoning_budget(request, self.tokenizer)

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
        sampled: Sequence[tuple[Request, Sequence[int]]],
        states: Mapping[str, RequestState],
    ) -> Tensor | None:
        """The mask of a step, [num_samples, W] i32 (see full_mask); None: all are allowed.

        sampled   the requests that the step samples, in order, and their drafts. Where a state's
                  mask depends on the output, the request has all tokens before the step
        states    by request id
        """
        grammars: dict[str, MaskedRows] = {}
        limited: list[tuple[Request, AllowedTokens, int, Sequence[int]]] = []
        budgets: list[tuple[Request, ReasoningBudget, int, Sequence[int]]] = []
        num_rows = 0
        for request, draft in sampled:
            state = states.get(request.id)
            if state is not None and state.matcher is not None:
                grammars[request.id] = state.matcher, num_rows, draft
            if state is not None and state.allowed is not None:
                limited.append((request, state.allowed, num_rows, draft))
            if (
                state is not None
                and state.budget is not None
                and state.budget.may_apply(num_output(request, draft))
            ):
                budgets.append((request, state.budget, num_rows, draft))
            num_rows += 1 + len(draft)
        mask = self.structured_outputs.mask(num_rows, grammars) if grammars else None
        if (limited or budgets) and mask is None:
            assert self.vocab_size is not None, "allowed_tokens refuses these requests"
            mask = full_mask(num_rows, self.vocab_size)
        for request, allowed, row, draft in limited:
            assert mask is not None
            bits = mask.numpy().view(np.uint32)[row : row + 1 + len(draft)]
            self.request_errors.run(
                request.id, "excluding its tokens", _exclude, allowed, bits, request, draft
            )
        for request, budget, row, draft in budgets:
            assert mask is not None
            bits = mask.numpy().view(np.uint32)[row : row + 1 + len(draft)]
            self.request_errors.run(
                request.id, "limiting its reasoning", budget.restrict, bits, request, draft
            )
        return mask


def num_output(request: Request, draft: Sequence[int]) -> int:
    """How many new tokens a request has at most before one that the step in preparation samples."""
    return request.length - request.num_prompt + len(draft)


def _exclude(
    allowed: AllowedTokens,
    rows: "np.typing.NDArray[np.uint32]",
    request: Request,
    draft: Sequence[int],
) -> None:
    start = max(len(request.tokens) - allowed.num_context, request.num_prompt)
    allowed.exclude(rows, request.tokens[start:], draft)
