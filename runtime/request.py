"""A request in plain Python: what is wanted, the tokens so far, and how many of them are in the cache."""

from dataclasses import dataclass, field
from typing import Literal

from atomc.runtime.draw import Draw
from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(eq=False)
class Request:
    """One sequence on its way. `tokens` are the prompt, then what was generated; the first `computed` are in the cache.

    eos_ids       the model's end-of-sequence tokens
    seed          is used where params.seed is None
    priority      the lowest runs first and gives way last, if the scheduler goes by it
    arrival       when it was queued, in seconds since the epoch
    salt          only requests of the same salt share cached prefixes
    finish_reason, stop_reason   as in Output, once it has finished
    Raises ValueError for an empty prompt.
    """

    id: str
    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    arrival: float = 0.0
    salt: str | None = None
    computed: int = 0
    num_cached: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"request {self.id!r}: the prompt is empty, it needs at least one token")
        self.tokens = list(self.tokens)
        self.num_prompt = len(self.tokens)
        if self.params.seed is not None:
            self.seed = self.params.seed

    @property
    def pending(self) -> int:
        """Tokens not in the cache yet: a whole prompt, the rest of one, or the one token that was drawn last."""
        return len(self.tokens) - self.computed

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def next_draw(self) -> Draw:
        """How the token after the last one is drawn."""
        return Draw(self.id, self.params, self.seed, self.num_new, self.num_prompt, self.tokens, self.eos_ids)

    def accept(self, token: int, max_len: int) -> None:
        """Append a drawn token; sets finish_reason if it is the last one, max_len tokens at the latest."""
        self.tokens.append(token)
        if token in self.eos_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif token in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.num_new == self.params.max_tokens or len(self.tokens) == max_len:
            self.finish_reason = "length"

    def output(self, start: int) -> "Output":
        """What is new since there were `start` tokens."""
        return Output(self.id, tuple(self.tokens[start:]), finish_reason=self.finish_reason,
                      stop_reason=self.stop_reason, num_cached=self.num_cached)  # fmt: skip


@dataclass(frozen=True)
class Output:
    """What is new of a request since its last Output. msgspec can encode it.

    token_ids         the new tokens
    logprobs          one for each of them; None if not asked for
    prompt_logprobs   one for each token of the prompt, the first None; comes once, with the first Output
    finish_reason     "stop": a stop or end-of-sequence token came; "length": max_tokens or the longest sequence;
                      "abort", "error"; None: it goes on
    stop_reason       the stop token; None for the model's own end-of-sequence tokens
    num_cached        tokens of the prompt that came from the prefix cache
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0


@dataclass(frozen=True)
class Completion:
    """What came of a prompt.

    text               the new text, without the token that stopped it; "" if there is no tokenizer
    token_ids          the new tokens, including the one that stopped it
    finish_reason      "stop": a stop or end-of-sequence token came; "length": max_tokens or the longest sequence
    prompt_token_ids   the prompt as the model saw it
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
