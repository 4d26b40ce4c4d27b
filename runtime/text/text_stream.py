"""Converts a request's outputs to text, and ends it at stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from atomc.runtime.requests.request import FinishReason, Output, TokenLogprobs
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.text.detokenizer import Detokenizer, Tokenizer


class TextDelta(NamedTuple):
    """The new text and tokens of a request.

    text            may lag behind the tokens: incomplete characters and possible stop strings are
                    held back
    token_ids       up to the token that completed a stop string
    logprobs        one per token; None if not requested
    finish_reason   as in Output
    stop_reason     as in Output, or the stop string that was found
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class TextStream:
    """The text of one request; empty without a tokenizer.

    Stop strings are matched after the first min_tokens tokens. The engine does not check them: if
    one is found, the owner of the stream must abort the request. Later outputs are ignored.
    """

    def __init__(
        self, tokenizer: "Tokenizer | None", prompt_tokens: Sequence[int], params: SamplingParams
    ) -> None:
        self.params = params
        self.finished = False
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, list(prompt_tokens), skip_special_tokens=params.skip_special_tokens
            )
        self._num_tokens = 0
        # Text that may start a stop string. No match may end in the first _unsearched characters.
        self._buffer = ""
        self._unsearched = 0

    def add(self, output: Output) -> TextDelta:
        """The text that these tokens complete; all remaining text if the request finished."""
        if self.finished:
            return TextDelta()
        if output.finish_reason is None and not self.params.stop:
            text = self._detokenizer.add(output.token_ids) if self._detokenizer else ""
            return TextDelta(text, output.token_ids, output.logprobs)
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
                emitted, stop = self._match_stop(
                    self._detokenizer.flush() if self._detokenizer else "", last=True
                )
                text += emitted
        return TextDelta(
            text, output.token_ids, output.logprobs, output.finish_reason, output.stop_reason
        )

    def _piece(self, token: int, end: Output | None) -> str:
        """The text that the token completes; if it ends the request, also the text held back."""
        if self._detokenizer is None:
            return ""
        if end is None:
            return self._detokenizer.add([token])
        # The stop token has no text, unless it is in stop_token_ids and include_stop_str_in_output
        # is set.
        has_text = end.finish_reason != "stop" or (
            end.stop_reason is not None and self.params.include_stop_str_in_output
        )
        return (self._detokenizer.add([token]) if has_text else "") + self._detokenizer.flush()

    def _match_stop(self, piece: str, last: bool) -> tuple[str, str | None]:
        """The text to return after adding `piece`, and the stop string that ends it, if any."""
        if not self.params.stop:
            return piece, None
        self._buffer += piece
        if self._num_tokens <= self.params.min_tokens:
            self._unsearched = len(self._buffer)
        matches = [
            (position, stop)
            for stop in self.params.stop
            if (position := self._buffer.find(stop, max(self._unsearched - len(stop) + 1, 0))) >= 0
        ]
        if matches:
            # The leftmost match; of several, the first in `stop`.
            position, stop = min(matches, key=lambda one: one[0])
            return self._buffer[
                : position + len(stop) * self.params.include_stop_str_in_output
            ], stop
        num_kept = 0 if last else self._partial_stop_length()
        emitted = self._buffer[: len(self._buffer) - num_kept]
        self._buffer = self._buffer[len(emitted) :]
        self._unsearched = max(self._unsearched - len(emitted), 0)
        return emitted, None

    def _partial_stop_length(self) -> int:
        """Length of the longest suffix of the buffer that is a prefix of a stop string."""
        longest = max(map(len, self.params.stop)) - 1
        ends = (self._buffer[-count:] for count in range(min(longest, len(self._buffer)), 0, -1))
        return next(
            (len(end) for end in ends if any(stop.startswith(end) for stop in self.params.stop)), 0
        )
