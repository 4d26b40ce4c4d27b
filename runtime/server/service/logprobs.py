"""Log-probabilities in the two formats of OpenAI's API."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

import msgspec

from atomc.files.json_types import JSONLike
from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.server.service.model_info import ModelInfo
from atomc.runtime.server.service.response_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
)


def chat_logprobs(model: ModelInfo, logprobs: Sequence[TokenLogprobs], top: int) -> ChatLogprobs:
    """For chat completions: one entry per token, with the `top` most likely tokens."""
    return {
        "content": [
            {
                **_entry(model, scores.token, scores.logprob),
                "top_logprobs": [
                    _entry(model, token, logprob) for token, logprob in scores.top[:top]
                ],
            }
            for scores in logprobs
        ],
        "refusal": None,
    }


def encoded(values: "Sequence[JSONLike | ChatTokenLogprob | msgspec.Raw]") -> list[msgspec.Raw]:
    """Each value as JSON: takes less memory, and spreads the cost of encoding over the stream."""
    return [msgspec.Raw(msgspec.json.encode(value)) for value in values]


def _entry(model: ModelInfo, token: int, logprob: float) -> ChatTopLogprob:
    text, raw = model.token_text_and_bytes(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters. A token that begins within a
    character has the position of that character.
    """

    def __init__(self, model: ModelInfo, skip_special_tokens: bool) -> None:
        self._model, self._skip = model, skip_special_tokens
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token: int) -> int:
        """The position of the next token."""
        position = self._num_characters
        if not (self._skip and self._model.is_special(token)):
            _, raw = self._model.token_text_and_bytes(token)
            self._num_characters += len(self._decoder.decode(bytes(raw)))
        return position


def completion_logprobs(
    model: ModelInfo,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    offsets: TextOffsets,
) -> CompletionLogprobs:
    """For completions: four lists with one item per token.

    The first token of a prompt has no log-probability. As in OpenAI's API, top_logprobs includes
    the chosen token.
    """
    return {
        "tokens": [model.token_text_and_bytes(token)[0] for token in tokens],
        "token_logprobs": [
            None if scores is None else _finite(scores.logprob) for scores in logprobs
        ],
        "top_logprobs": [None if scores is None else _top(model, scores) for scores in logprobs],
        "text_offset": [offsets.next(token) for token in tokens],
    }


def prompt_logprobs(
    model: ModelInfo, logprobs: Sequence[TokenLogprobs | None]
) -> list[msgspec.Raw]:
    """In vLLM's format: for each prompt token, token id -> log-probability, rank and text."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, JSONLike]:
        text, _ = model.token_text_and_bytes(token)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    return encoded(
        [
            None
            if scores is None
            else {
                str(token): entry(token, logprob, rank)
                for rank, (token, logprob) in enumerate(scores.top, 1)
            }
            | {str(scores.token): entry(scores.token, scores.logprob, scores.rank)}
            for scores in logprobs
        ]
    )


def _top(model: ModelInfo, scores: TokenLogprobs) -> dict[str, float]:
    likely = {
        model.token_text_and_bytes(token)[0]: _finite(logprob) for token, logprob in scores.top
    }
    return likely | {model.token_text_and_bytes(scores.token)[0]: _finite(scores.logprob)}


def _finite(logprob: float) -> float:
    """JSON has no -inf, the log-probability of an impossible token; OpenAI returns -9999."""
    return max(logprob, -9999.0)
