"""Ends the reasoning of a request after a number of tokens: the closing tag is then the only token
that may be sampled.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from atomc.runtime.requests.request import Request
from atomc.runtime.text.detokenizer import Tokenizer, decode

OPEN, CLOSE = "<think>", "</think>"
# How many tokens before the budget is used up the reasoning may end, if a sentence ends there.
MARGIN = 16
SENTENCE_ENDS = (".", "!", "?", "\n", "\u3002", "\uff01", "\uff1f")
QUOTES = " \"')]*_`\u201d\u2019"


def tag_tokens(tokenizer: "Tokenizer | None") -> tuple[int, int] | None:
    """The token ids of the opening and the closing tag; None if one of them is no token."""
    if tokenizer is None:
        return None
    opening, closing = map(tokenizer.token_to_id, (OPEN, CLOSE))
    return None if opening is None or closing is None else (opening, closing)


def ends_sentence(piece: str) -> bool:
    return piece.rstrip(QUOTES).endswith(SENTENCE_ENDS)


@dataclass
class ReasoningBudget:
    """budget           maximum number of tokens, with the closing tag, and the opening one unless
                        the prompt has it
    opening, closing    tokens of the tags
    is_open             the output begins within the reasoning; otherwise it has some only if its
                        first token, after white space, is the opening tag
    text                of a token
    """

    budget: int
    opening: int
    closing: int
    is_open: bool
    text: Callable[[int], str]
    _count: int = 0  # tokens of the reasoning
    _last: int | None = None
    _ended: bool = False  # or there is none
    _num_read: int = 0

    def may_apply(self, num_output: int) -> bool:
        """Whether the token after so many may have to be the closing tag."""
        return not self._ended and num_output >= self._first

    @property
    def _first(self) -> int:
        """The least number of tokens before the closing tag."""
        return max(self.budget - 1 - min(MARGIN, self.budget // 2), 0)

    def restrict(
        self, mask: npt.NDArray[np.uint32], request: Request, draft: Sequence[int]
    ) -> None:
        """Clear the bits of the tokens that must not be sampled in mask [rows, W], one row after
        the output of the request and one after each token of the draft. W: as in AllowedTokens.
        """
        for token in request.tokens[request.num_prompt + self._num_read :]:
            self._read(token)
        ahead = copy(self)
        for row, words in enumerate(mask):
            if row:
                ahead._read(draft[row - 1])
            if ahead._must_close:
                word, bit = self.closing // 32, np.uint32(1 << self.closing % 32)
                bit &= words[word]
                words[:] = 0
                words[word] = bit

    @property
    def _must_close(self) -> bool:
        if self._ended or not self.is_open or self._count < self._first:
            return False
        at_end = self._last is not None and ends_sentence(self.text(self._last))
        return at_end or self._count >= self.budget - 1

    def _read(self, token: int) -> None:
        self._num_read += 1
        self._last = token
        if self._ended:
            return
        self.is_open = self.is_open or token == self.opening
        self._ended = token == self.closing or not (self.is_open or self.text(token).isspace())
        self._count += self.is_open


def reasoning_budget(request: Request, tokenizer: "Tokenizer | None") -> ReasoningBudget | None:
    """The budget of a request that has one. Raises ValueError if the tags are no tokens."""
    budget, is_open = request.params.thinking_token_budget, request.params.thinking_is_open
    if budget is None:
        return None
    tags = tag_tokens(tokenizer)
    if tags is None or tokenizer is None:
        raise ValueError(
            f"thinking_token_budget needs a tokenizer that has {OPEN} and {CLOSE} as tokens, this "
            "model's has not: leave it out"
        )
    if is_open is None:
        prompt = request.tokens[: request.num_prompt]
        last = next((token for token in reversed(prompt) if token in tags), None)
        is_open = last == tags[0]
    return ReasoningBudget(
        budget, *tags, is_open, lambda token: decode(tokenizer, [token], skip_special_tokens=False)
    )
