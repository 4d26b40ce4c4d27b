"""A request in plain Python: what is wanted, the tokens so far, and how many of them are in the cache."""

from dataclasses import dataclass, field, replace
from typing import Literal

from atomc.runtime.draw import Draw
from atomc.runtime.fence import RequestError
from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]


@dataclass(eq=False)
class Request:
    """One sequence on its way. `tokens` are the prompt, then what was generated; the first `computed` are in the cache.

    eos_ids       the model's end-of-sequence tokens
    seed          is used where params.seed is None
    priority      the lowest runs first and gives way last, if the scheduler goes by it
    arrival       when it was queued, in seconds since the epoch
    salt          only requests of the same salt share cached prefixes
    pooling       instead of new tokens, the mean of the prompt's hidden states, or the last of them, is wanted
    draft         tokens that may follow `tokens`: computed with the next step, and kept as far as they are right
    drawing       tokens that steps in flight draw: they count as computed or pending, and are not in `tokens` yet
    scored        rows of the prompt whose log-probabilities are known or on their way
    num_cached    tokens of the prompt that came from the prefix cache
    keys          of the full blocks of `tokens` (atomc.runtime.prefix_cache); the first num_named of them can be found
    slot          its row while it runs, else None
    announced     a step has told the worker what it needs of the request in this slot
    number, admitted   the scheduler's: its place in the order of arrival, and how often it was admitted
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
    pooling: Pooling | None = None
    draft: tuple[int, ...] = ()
    computed: int = 0
    drawing: int = 0
    scored: int = 0
    num_cached: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_named: int = 0
    slot: int | None = None
    announced: bool = False
    number: int = 0
    admitted: int = 0
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
    def length(self) -> int:
        """Tokens, with those that steps in flight draw."""
        return len(self.tokens) + self.drawing

    @property
    def pending(self) -> int:
        """Tokens not in the cache yet: a whole prompt, the rest of one, or the one token that was drawn last."""
        return len(self.tokens) + self.drawing - self.computed

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that cannot come first."""
        return Draw(self.params, eos_ids=self.eos_ids).banned

    def room(self, max_len: int) -> int:
        """So many new tokens may still come after those in flight; a sequence has at most max_len."""
        room = max_len - self.length
        if self.params.max_tokens is None:
            return room
        return min(room, self.params.max_tokens - (self.length - self.num_prompt))

    def accept(self, token: int, max_len: int) -> None:
        """Append a drawn token; sets finish_reason if it is the last one, max_len tokens at the latest."""
        self.tokens.append(token)
        # Nothing fits a form of output that has come to its end.
        if token in self.eos_ids and (not self.params.ignore_eos or self.params.structured is not None):
            self.finish_reason = "stop"
        elif token in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token
        elif self.num_new == self.params.max_tokens or len(self.tokens) == max_len:
            self.finish_reason = "length"

    def output(self, start: int) -> "Output":
        """What is new since there were `start` tokens."""
        return Output(self.id, tuple(self.tokens[start:]), finish_reason=self.finish_reason,
                      stop_reason=self.stop_reason, num_cached=self.num_cached)  # fmt: skip


def siblings(request: Request) -> list[Request]:
    """params.n requests of the same prompt, with the ids "id/0", "id/1" and so on, and seeds that follow each other."""
    if request.params.n == 1:
        return [request]
    params = replace(request.params, n=1, seed=None)
    return [replace(request, id=f"{request.id}/{i}", params=params, seed=request.seed + i, tokens=list(request.tokens),
                    keys=[]) for i in range(request.params.n)]  # fmt: skip


@dataclass(frozen=True)
class Output:
    """What is new of a request since its last Output. msgspec can encode it.

    token_ids         the new tokens
    logprobs          one for each of them; None if not asked for
    prompt_logprobs   one for each token of the prompt, the first None; comes once, with the first Output
    finish_reason     "stop": a stop or end-of-sequence token came; "length": max_tokens or the longest sequence;
                      "abort"; "error": see error; None: it goes on
    stop_reason       the stop token; None for the model's own end-of-sequence tokens
    num_cached        tokens of the prompt that came from the prefix cache
    embedding         the pooled hidden state, of a request with `pooling`
    error             why the request failed
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    embedding: tuple[float, ...] | None = None
    error: RequestError | None = None


@dataclass(frozen=True)
class Completion:
    """What came of a prompt.

    text               the new text, without the token or the text that stopped it; "" if there is no tokenizer
    token_ids          the new tokens, including the one that stopped it
    finish_reason      "stop": a stop or end-of-sequence token, or a stop string, came; "length": max_tokens or the
                       longest sequence; "error": the request failed, and text and token_ids are what came before
    prompt_token_ids   the prompt as the model saw it
    logprobs, prompt_logprobs, stop_reason, num_cached, error   as in Output
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    error: RequestError | None = None
