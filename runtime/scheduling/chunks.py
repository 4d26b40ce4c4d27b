"""The chunks of requests: the next tokens of a request as a value, and what its result changes; and
the step that chunks and decode rows make up, until it is finished.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from atomc.runtime.requests.request import Request, overlapping
from atomc.runtime.scheduling.blocks import BlockPool, NewBlocks
from atomc.runtime.scheduling.prefix_sharing import PrefixSharing
from atomc.runtime.scheduling.speculative import ForcedAcceptance
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.stats import Counters
from atomc.runtime.scheduling.step import Admission, Chunk, Copy, ImageRows, ScheduledStep

SEED_BITS = 2**64 - 1
# A stream with at most this many tokens to compute (its last one, and drafts) is no prompt.
MOST_OF_STREAM = 16


@dataclass(eq=False)
class Chunks:
    """Makes the chunks of running requests, and brings a request to where it is after one.

    Arguments as in Scheduler. forced: accepts drafts, instead of their comparison with the sampled
    tokens; a benchmark sets it.
    """

    pool: BlockPool
    prefixes: PrefixSharing
    counters: Counters
    max_len: int
    state_rows: StateRows | None
    forced: ForcedAcceptance | None = None

    def make(self, request: Request, count: int) -> Chunk:
        """The chunk of the next `count` tokens; marks them as computed."""
        assert request.slot is not None
        start, end = request.computed, request.computed + count
        num_known = len(request.tokens)
        tokens = request.tokens[start:end]
        last = end == num_known + len(request.draft)
        num_output_rows = num_samples = (
            1 + len(request.draft) if last and not request.pooling else 0
        )
        scored: list[int] = []
        if request.pooling:
            num_output_rows = count if request.pooling == "mean" else int(last)
        elif request.scores_prompt and request.scored < min(end, request.num_prompt - 1):
            first = max(start, request.scored)
            num_output_rows = end - first
            scored = request.tokens[first + 1 : min(end + 1, request.num_prompt)]
            request.scored = min(end, request.num_prompt - 1)
        sampling_draft = num_samples > 1
        chunk = Chunk(
            request.id,
            request.slot,
            (*tokens, *request.draft) if last else tuple(tokens),
            start,
            self.pool.take_new_blocks(request.id),
            num_samples,
            num_output_rows,
            tuple(scored),
            None if request.admission_sent else _admission(request),
            request.tokens[end] if end < num_known else 0,
            self.num_forced(request) if sampling_draft else None,
            _image_rows(request, start, end),
            request.state_from,
            self._row_before_draft(request) if sampling_draft else None,
        )
        request.state_from = None
        request.admission_sent = True
        request.computed = end
        request.num_in_flight += num_samples > 0
        return chunk

    def undo(self, request: Request, start: int, chunk: Chunk | None) -> None:
        """Go back to before a chunk that did not run, or a decode row. Not for state that cannot
        roll back, unless the chunk is the first.
        """
        if chunk is not None:
            request.admission_sent = chunk.admission is None
            request.scored -= len(chunk.scored)
        request.last_snapshot = min(request.last_snapshot, start)
        request.computed = start
        self.pool.resend_blocks(request.id)

    def finish(
        self, request: Request, chunk: Chunk, admission: int, new: Sequence[int]
    ) -> tuple[int, ...] | None:
        """The new tokens of a request after its chunk; None without any, unless it has ended.

        admission   num_admissions of the request when the step was scheduled
        new         the tokens that were sampled
        """
        num_known = len(request.tokens)
        if chunk.num_samples:
            self._accept(request, chunk, new)
        if request.runs_since(admission):
            self._reject(request, chunk, chunk.num_samples - len(new))
            # Larger if another step is in flight.
            self.cache_and_trim(request, min(chunk.end, request.computed))
        if request.pooling and chunk.end == request.num_prompt:
            request.finish_reason = "stop"
        ended = request.finish_reason is not None
        if not ended and len(request.tokens) == num_known:
            return None
        return tuple(request.tokens[num_known:])

    def cache_and_trim(self, request: Request, computed: int) -> None:
        """Share the full blocks of a request, and release those outside its windows, when so many
        tokens are computed.
        """
        self.prefixes.cache_full_blocks(request, computed)
        self.pool.trim(request.id, computed)

    def check(self, request: Request) -> None:
        """Assert that the numbers of a request that has not ended agree."""
        assert request.finish_reason is None, f"finished but still queued: {request}"
        pending = request.pending + (len(request.draft) if request.num_in_flight else 0)
        assert pending > 0 or (request.pooling and pending == 0), f"no pending tokens: {request}"
        assert request.length <= self.max_len, f"longer than max_len: {request}"
        assert (
            request.num_cached_blocks * self.pool.block_size <= request.computed
            or request.slot is None
        ), f"blocks cached before they were computed: {request}"
        assert request.computed == 0 or request.slot is not None, (
            f"{request.id} is waiting, but computed is {request.computed}"
        )

    def _accept(self, request: Request, chunk: Chunk, tokens: Sequence[int]) -> None:
        """Append sampled tokens up to one that finishes the request."""
        request.num_in_flight -= 1
        drafted = chunk.num_samples - 1
        if drafted:
            self.counters.drafts += 1
            self.counters.drafted += drafted
            self.counters.accepted += len(tokens) - 1
            request.draft = ()
            request.num_drafts += 1
        for token in tokens:
            request.accept(token)
            self.counters.generated_tokens += 1
            if request.finish_reason is not None:
                break
        if chunk.end - drafted == request.num_prompt:
            self.counters.prompt_tokens += request.num_prompt

    def _reject(self, request: Request, chunk: Chunk, count: int) -> None:
        """Go back to the state before the last `count` tokens of the chunk, which were rejected."""
        if count and self.state_rows is not None:
            assert request.slot is not None
            request.computed = chunk.start
            request.state_from = self.state_rows.row_before_draft(request.slot)
        else:
            request.computed -= count

    def num_forced(self, request: Request) -> int | None:
        """How many tokens of its draft to accept; None: those that are equal."""
        if self.forced is None or request.params.constraints:
            return None
        return min(self.forced.count(request.seed, request.num_drafts), len(request.draft))

    def _row_before_draft(self, request: Request) -> int | None:
        """The row that is to keep the state before a draft; None if it is there, or can be rolled
        back.
        """
        assert request.slot is not None
        if self.state_rows is None:
            return None
        row = self.state_rows.row_before_draft(request.slot)
        return None if row == request.state_from else row


def _admission(request: Request) -> Admission:
    """What the worker needs to know of the request, sent with its first chunk."""
    cached = request.tokens[: request.computed] if request.params.penalized else ()
    return Admission(
        request.params,
        request.seed & SEED_BITS,
        request.num_prompt,
        request.eos_ids,
        request.pooling,
        tuple(cached),
        tuple([(image.start, image.grid) for image in request.images]),
        None if request.lora is None else request.lora.number,
    )


def _image_rows(request: Request, start: int, end: int) -> tuple[ImageRows, ...]:
    """The images with tokens in a chunk of the tokens start to end - 1."""
    rows = []
    for image in overlapping(request.images, start, end) if request.images else ():
        first = max(start, image.start)
        count = min(end, image.end) - first
        rows.append(ImageRows(image.digest, first - start, first - image.start, count))
    return tuple(rows)


@dataclass
class StepInFlight:
    """A step: first under construction, then scheduled and not finished.

    budget      tokens that may still be added
    prompts     of these, tokens of prompts
    entries     each chunk with its request, and the num_admissions of that
    rows        the request of each decode row: it is not admitted again before the row is finished
    blocks      as in DecodeRows
    snapshots   each copy of a request's state after so many tokens, with its num_admissions
    """

    pooled: bool
    budget: int
    prompts: int
    entries: list[tuple[Request, int, Chunk]] = field(default_factory=list)
    rows: list[Request] = field(default_factory=list)
    blocks: list[tuple[int, tuple[NewBlocks, ...]]] = field(default_factory=list)
    snapshots: list[tuple[Copy, Request, int, int]] = field(default_factory=list)
    step: ScheduledStep = field(default_factory=lambda: ScheduledStep(()))

    def accepts(self, request: Request) -> bool:
        """Whether this kind of request may be in the step."""
        return (request.pooling is not None) == self.pooled

    def add(self, request: Request, chunk: Chunk) -> None:
        self.entries.append((request, request.num_admissions, chunk))
        self.budget -= chunk.num_tokens
        self.prompts -= chunk.num_prompt_tokens

    def most_tokens(self, request: Request) -> int:
        """How many tokens of the request may be added."""
        if request.pending <= (MOST_OF_STREAM if request.num_new else 1):
            return self.budget
        return max(min(self.budget, self.prompts), 0)

    @property
    def requests(self) -> list[tuple[Request, Chunk | None]]:
        """The request of each chunk, then of each decode row."""
        of_chunks = [(request, chunk) for request, _, chunk in self.entries]
        return [*of_chunks, *[(request, None) for request in self.rows]]

    @property
    def num_sampling(self) -> int:
        """How many requests that have not ended the step samples tokens of."""
        sampling = [request for request, _, chunk in self.entries if chunk.num_samples] + self.rows
        return sum(request.finish_reason is None for request in sampling)
