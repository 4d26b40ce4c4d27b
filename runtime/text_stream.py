"""Text from a request's outputs, with stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atomc.runtime.detokenizer import Detokenizer
from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.request import FinishReason, Output
from atomc.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class TextDelta:
    """What is new of a request.

    text            may lag behind the tokens, which may be in the middle of a character or of a stop string
    token_ids       up to the one that completed a stop string
    logprobs        one for each of them; None if not asked for
    finish_reason, stop_reason   as in Output; the stop string that was found is a reason, too
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class TextStream:
    """Text of one request; without a tokenizer there is none.

    A stop string counts from the token on that follows the first min_tokens. If one is found, the engine does not know:
    whoever owns the stream aborts the request. Outputs that still come are passed over.
    """

    def __init__(self, tokenizer: Any | None, prompt_tokens: Sequence[int], params: SamplingParams) -> None:
        self.params = params
        self.finished = False
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, list(prompt_tokens), skip_special_tokens=params.skip_special_tokens)
        self._num_tokens = 0
        # Text that may be the beginning of a stop string; the first _unsearched characters cannot end one.
        self._buffer = ""
        self._unsearched = 0

    def add(self, output: Output) -> TextDelta:
        """The text that these tokens complete, perhaps none; all that is left if the request finished."""
        if self.finished:
            return TextDelta()
        text = ""
        for i, token in enumerate(output.token_ids):
            last = output.finish_reason is not None and i == len(output.token_ids) - 1
            piece = self._piece(token, output if last else None)
            self._num_tokens += 1
            emitted, stop = self._match_stop(piece, last)
            text += emitted
            if stop is not None:
                self.finished = True
                logprobs = None if output.logprobs is None else output.logprobs[: i + 1]
                return TextDelta(text, output.token_ids[: i + 1], logprobs, "stop", stop)
        if output.finish_reason is not None:
            self.finished = True
            if not output.token_ids:
                emitted, stop = self._match_stop(self._detokenizer.flush() if self._detokenizer else "", last=True)
                text += emitted
        return TextDelta(text, output.token_ids, output.logprobs, output.finish_reason, output.stop_reason)

    def _piece(self, token: int, end: Output | None) -> str:
        """The text that the token completes; if it ends the request, also what was held back."""
        if self._detokenizer is None:
            return ""
        if end is None:
            return self._detokenizer.add([token])
        # The token that stopped the request is no text, unless the user named it and wants to see what stopped it.
        has_text = end.finish_reason != "stop" or (end.stop_reason is not None and self.params.include_stop_str_in_output)
        return (self._detokenizer.add([token]) if has_text else "") + self._detokenizer.flush()

    def _match_stop(self, piece: str, last: bool) -> tuple[str, str | None]:
        """Text to give out after `piece` came, and the stop string that ends it, if there is one."""
        if not self.params.stop:
            return piece, None
        self._buffer += piece
        if self._num_tokens <= self.params.min_tokens:
            self._unsearched = len(self._buffer)
        found = [(position, stop) for stop in self.params.stop if (position := self._find_stop(stop)) >= 0]
        if found:
            # The one that begins first, and of those the one that the user names first.
            position, stop = min(found, key=lambda one: one[0])
            return self._buffer[: position + len(stop) * self.params.include_stop_str_in_output], stop
        num_kept = 0 if last else self._partial_stop_length()
        emitted = self._buffer[: len(self._buffer) - num_kept]
        self._buffer = self._buffer[len(emitted) :]
        self._unsearched = max(self._unsearched - len(emitted), 0)
        return emitted, None

    def _find_stop(self, stop: str) -> int:
        """Where it is in the text that was held; -1: nowhere."""
        return self._buffer.find(stop, max(self._unsearched - len(stop) + 1, 0))

    def _partial_stop_length(self) -> int:
        """Characters at the end of what is held that may be the beginning of a stop string."""
        longest = max(map(len, self.params.stop)) - 1
        ends = (self._buffer[-count:] for count in range(min(longest, len(self._buffer)), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self.params.stop)), 0)
