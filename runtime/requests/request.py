"""Requests, their images, outputs and completions, without tensors."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import prod
from typing import Literal

from atomc.runtime.requests.request_errors import RequestError
from atomc.runtime.requests.sample_spec import SampleSpec
from atomc.runtime.requests.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]
NO_LIMIT = 2**62


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability and rank (1: most likely) of a token: log-softmax of the model's logits,
    before temperature, penalties and filters.

    top   the most likely tokens with their log-probabilities, best first
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptImage:
    """An image, or one temporal patch of a video. msgspec can encode it.

    start    position of its first token in the prompt; these tokens are the model's image token. 0
             until the prompt is made
    length   number of its tokens
    grid     number of patches: temporal, vertical, horizontal
    pixels   the patches as transformers' processor orders them, fp32 [patches, values], row-major
    digest   hash of grid and pixels: images with equal digests have equal embeddings
    """

    start: int
    length: int
    grid: tuple[int, int, int]
    pixels: bytes
    digest: bytes

    def salted(self, salt: str | None) -> "PromptImage":
        """The image with another digest for each salt, so that only requests with the same salt
        share its pixels and embeddings.
        """
        if salt is None:
            return self
        digest = blake2b(self.digest + salt.encode(), digest_size=len(self.digest)).digest()
        return replace(self, digest=digest)

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_patches(self) -> int:
        return prod(self.grid)


def overlapping(images: Sequence[PromptImage], start: int, end: int) -> Sequence[PromptImage]:
    """The images of a prompt with tokens at positions start to end - 1."""
    first = bisect_right(images, start, key=lambda image: image.end)
    last = bisect_left(images, end, key=lambda image: image.start)
    return images[first:last]


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter, as loaded once: it is another one after it was unloaded and loaded again.

    number    its place in the adapters of a program, which another one has after it
    identity  differs between all loads of one engine
    folder    from which it was loaded
    """

    name: str
    number: int
    identity: int
    folder: str


@dataclass(eq=False, slots=True)
class Request:
    """One sequence in progress. `tokens` are the prompt and the generated tokens; the first
    `computed` are in the KV cache.

    eos_ids       the model's end-of-sequence tokens
    seed          used if params.seed is None
    priority      lower values run first and are preempted last, with scheduling_policy="priority"
    salt          requests share cached prefixes and images only with requests of the same salt
    pooling       return the mean of the prompt's hidden states, or the last of them, instead of new
                  tokens
    images        of the prompt, in order; () once the request has ended
    lora          the LoRA adapter; None: the model as it is
    draft         speculative tokens after `tokens`: computed in the next step, and kept up to the
                  first wrong one
    num_drafts    number of its drafts that are verified
    num_in_flight number of tokens that steps in flight sample: counted as computed or pending, not
                  in `tokens` yet
    scored        prompt rows whose log-probabilities are computed or in flight
    num_cached    prompt tokens from the prefix cache
    keys          keys of the full blocks of `tokens` (runtime.scheduling.prefix_cache); the first
                  num_cached_blocks are in its index
    shares_prefix   what it computes enters the prefix cache: not after a reset, until it is
                    admitted again
    slot          row of the request while it runs, else None
    state_from    the row that has its state per sequence before the next token; None: its slot, or
                  there is none
    snapshot_points   positions at which it takes snapshots of this state; last_snapshot: the
                  position of the last one that it took or started from
    moving_snapshot   key of the snapshot between these points, which the next one replaces
    admission_sent     a step has sent the worker the request's parameters for this slot
    max_length    number of tokens at which it ends; the scheduler lowers it to its own limit
    last_ids      tokens at which it ends
    number        position in the order of arrival, set by the scheduler
    num_admissions  how often the request was admitted, set by the scheduler
    queued_since    time.monotonic when it was queued; queue_seconds: time from then to its first
                    admission, both set by the scheduler
    finish_reason, stop_reason   as in Output, once finished

    Raises ValueError for an empty prompt.
    """

    id: str
    tokens: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()
    seed: int = 0
    priority: int = 0
    salt: str | None = None
    pooling: Pooling | None = None
    images: tuple[PromptImage, ...] = ()
    lora: LoadedAdapter | None = None
    draft: tuple[int, ...] = ()
    computed: int = 0
    num_drafts: int = 0
    num_in_flight: int = 0
    scored: int = 0
    num_cached: int = 0
    keys: list[bytes] = field(default_factory=list)
    num_cached_blocks: int = 0
    shares_prefix: bool = True
    slot: int | None = None
    state_from: int | None = None
    snapshot_points: tuple[int, ...] = ()
    last_snapshot: int = 0
    moving_snapshot: bytes | None = None
    admission_sent: bool = False
    number: int = 0
    num_admissions: int = 0
    queued_since: float = 0.0
    queue_seconds: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_prompt: int = field(init=False)
    max_length: int = field(init=False)
    last_ids: frozenset[int] = field(init=False)
    _eos_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(
                f"request {self.id!r}: the prompt is empty, it needs at least one token"
            )
        self.tokens = list(self.tokens)
        self.num_prompt = len(self.tokens)
        max_tokens = self.params.max_tokens
        self.max_length = NO_LIMIT if max_tokens is None else self.num_prompt + max_tokens
        # Structured output always ends at an end-of-sequence token: no token may follow.
        ignores_eos = self.params.ignore_eos and self.params.structured is None
        self._eos_ids = frozenset() if ignores_eos else self.eos_ids
        self.last_ids = self._eos_ids.union(self.params.stop_token_ids)
        if self.params.seed is not None:
            self.seed = self.params.seed

    @property
    def length(self) -> int:
        """Number of tokens, including those that steps in flight sample."""
        return len(self.tokens) + self.num_in_flight

    @property
    def pending(self) -> int:
        """Number of tokens not in the cache yet: a prompt, the rest of one, or the last sampled
        token.
        """
        return self.length - self.computed

    def runs_since(self, admission: int) -> bool:
        """Whether it runs, and was not preempted since num_admissions was `admission`."""
        return self.slot is not None and self.num_admissions == admission

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt's tokens are computed."""
        return self.params.prompt_logprobs is not None

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not be sampled first."""
        return SampleSpec(self.params, eos_ids=self.eos_ids).banned

    @property
    def room(self) -> int:
        """How many new tokens may follow those in flight."""
        return self.max_length - self.length

    def accept(self, token: int) -> None:
        """Append a sampled token; sets finish_reason if it is the last one."""
        self.tokens.append(token)
        if token in self.last_ids or len(self.tokens) == self.max_length:
            self.finish()

    def finish(self) -> None:
        """Set finish_reason: the last token ends the request."""
        token = self.tokens[-1]
        self.finish_reason = "stop" if token in self.last_ids else "length"
        if token in self.last_ids and token not in self._eos_ids:
            self.stop_reason = token


def siblings(request: Request) -> list[Request]:
    """params.n requests with the same prompt, the ids "id/0", "id/1", ..., and consecutive
    seeds.
    """
    if request.params.n == 1:
        return [request]
    params = replace(request.params, n=1, seed=None)
    return [
        replace(
            request,
            id=f"{request.id}/{i}",
            params=params,
            seed=request.seed + i,
            tokens=list(request.tokens),
            keys=[],
        )
        for i in range(request.params.n)
    ]


@dataclass(slots=True)  # not frozen: one is made for each token, in a quarter of the time
class Output:
    """The new tokens of a request since its last Output. msgspec can encode it.

    token_ids         the new tokens
    finish_reason     "stop": a stop or end-of-sequence token; "length": max_tokens or max_model_len
                      reached; "abort"; "error": see error; None: not finished
    stop_reason       the stop token; None for the model's end-of-sequence tokens
    num_cached        prompt tokens from the prefix cache
    queue_seconds     time between the request's arrival at the engine and its first admission
    logprobs          one per new token; None if not requested
    prompt_logprobs   one per prompt token, the first None; only in the first Output
    embedding         the pooled hidden state, for a request with `pooling`
    error             why the request failed
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    queue_seconds: float = field(default=0.0, compare=False)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: tuple[float, ...] | None = None
    error: RequestError | None = None


@dataclass(frozen=True)
class Completion:
    """The generated continuation of a prompt.

    text               the new text, without the stop token or stop string; "" without a tokenizer
    token_ids          the new tokens, including a stop token
    finish_reason      "stop": a stop token, end-of-sequence token or stop string; "length":
                       max_tokens or max_model_len reached; "error": the request failed, text and
                       token_ids have what was generated before
    prompt_token_ids   the tokens of the prompt
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
