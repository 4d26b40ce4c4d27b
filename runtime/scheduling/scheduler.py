"""The scheduler: selects the requests of each step, and how many of their tokens it computes."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

from atomc.runtime.requests.request import FinishReason, Output, Request
from atomc.runtime.requests.request_errors import RequestErrors
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.chunks import Chunks, StepInFlight
from atomc.runtime.scheduling.image_cache import ImageCache, computed_in_part
from atomc.runtime.scheduling.image_limits import ImageLimits
from atomc.runtime.scheduling.pixel_store import PixelStore
from atomc.runtime.scheduling.prefix_sharing import PrefixSharing
from atomc.runtime.scheduling.request_queues import RequestQueues
from atomc.runtime.scheduling.snapshots import Snapshots
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.stats import Counters
from atomc.runtime.scheduling.step import Chunk, DecodeRows, ScheduledStep

# Each prompt token with log-probabilities takes a row of V fp32 logits.
MOST_SCORED_ROWS = 128
# Prompt tokens of requests passed in a step that are hashed for the prefix cache: some 2 ms.
MOST_HASHED = 2**15


class QueueFull(Exception):
    """The queue is full. what: of what there is too much; retry_after: seconds."""

    retry_after = 1.0

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}, the queue takes no more: try again in {self.retry_after:.0f} s")


class Scheduler:
    """Continuous batching with chunked prefill; preempts the last request when blocks run out.

    Requests are ordered by arrival; with policy "priority" by priority (lowest value first), then
    by arrival. `running` requests own blocks, `waiting` ones do not; both lists are sorted. A
    preempted request waits again and recomputes the tokens that left the prefix cache.

    State per sequence cannot go back to an earlier token. A request starts from a snapshot of it,
    and after a rejected draft from the state before the draft: the accepted tokens are computed
    again, in the step of the next draft.

    Several steps may be in flight; they finish in the order in which they were scheduled. The next
    step may reuse released blocks and slots at once, because the device runs steps in order.

    Errors of a single request go to `request_errors`; the request may still be in steps until it is
    aborted.

    state_rows      as in Limits; without snapshots of it, no prefix is shared
    lookahead       blocks are reserved for this many tokens after those of a step, because a draft
                    model writes there
    images          None: the model takes no images
    image_queue_bytes   limit of the pixels of all requests
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_queue: int = 1024,
        policy: str = "fcfs",
        request_errors: RequestErrors | None = None,
        state_rows: StateRows | None = None,
        snapshots: Snapshots | None = None,
        lookahead: int = 0,
        images: ImageLimits | None = None,
        image_queue_bytes: int = 2**62,
    ) -> None:
        self.pool, self.counters = pool, Counters()
        self.request_errors = request_errors or RequestErrors()
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_queue = max_queue
        self.state_rows, self.snapshots, self.lookahead = state_rows, snapshots, lookahead
        # Maximum sequence length: such a request must fit if it has the whole pool.
        self.max_len = min(max_model_len, pool.longest(2 * max_num_batched_tokens))
        self.queues = RequestQueues(max_num_seqs, by_priority=policy == "priority")
        self.prefixes = PrefixSharing(pool, snapshots, self.request_errors)
        self.chunks = Chunks(pool, self.prefixes, self.counters, self.max_len, state_rows)
        self.images = ImageCache(images)
        self.pixels = PixelStore(image_queue_bytes)
        self._in_flight: deque[StepInFlight] = deque()
        self._pooled_last = False

    @property
    def pools(self) -> Sequence[BlockPool]:
        """The blocks of each data-parallel rank."""
        return (self.pool,)

    @property
    def num_snapshots(self) -> int:
        """States of prefixes that are held."""
        return self.snapshots.num_cached if self.snapshots is not None else 0

    @property
    def requests(self) -> Mapping[str, Request]:
        """All requests by id."""
        return self.queues.requests

    @property
    def running(self) -> Sequence[Request]:
        """Requests that own a slot and blocks, in order."""
        return self.queues.running

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that do not, in order."""
        return self.queues.waiting

    @property
    def num_streams(self) -> int:
        """Number of running requests that have a new token, or one in flight."""
        return sum([request.length > request.num_prompt for request in self.running])

    @property
    def num_steps_in_flight(self) -> int:
        """Number of scheduled steps that are not finished."""
        return len(self._in_flight)

    def step_requests(self, index: int) -> Sequence[tuple[Request, Chunk | None]]:
        """The requests of a step in flight, with their chunks, in the order of their rows; None:
        a decode row. index: 0 for the next step to finish, -1 for the last one scheduled.
        """
        return self._in_flight[index].requests

    def forget_counts(self) -> None:
        """Reset the counters and the caches. There must be no requests."""
        assert not self.requests, "requests are running"
        self.reset_prefix_cache()
        vars(self.counters).update(vars(Counters()))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes and embeddings of images. No step may be in flight."""
        assert not self._in_flight, "a step is in flight"
        self.prefixes.clear(self.running)
        self.images.clear()

    def evict(self, request_id: str) -> None:
        """Remove what the request computed from the prefix cache, and what it shares. The
        embeddings of its images are not used again.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self.prefixes.evict(request)
            for image in request.images:
                self.images.forget(image.digest)

    def refuse(self, request: Request) -> None:
        """Raise ValueError if the request's prompt can never fit, or its id is in use."""
        longest = self.max_len if request.pooling else self.max_len - 1
        if request.num_prompt > longest:
            raise ValueError(
                f"request {request.id!r}: a prompt of {request.num_prompt} tokens does not "
                f"fit, at most {longest} do"
                + (
                    ""
                    if request.pooling
                    else f" (one token is to follow, and a sequence has at most {self.max_len})"
                )
                + "; shorten it, or raise max_model_len or the size of the cache"
            )
        if request.id in self.requests:
            raise ValueError(f"request id {request.id!r} is in use")

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `refuse` raises, and QueueFull if too many wait."""
        self.refuse(request)
        if len(self.waiting) >= self.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests wait already")
        if not self.pixels.has_room(request.images):
            held = f"images of {len(self.requests)} requests take {self.pixels.num_bytes} bytes"
            raise QueueFull(held)
        request.images = self.pixels.add(request.images)
        request.max_length = min(request.max_length, self.max_len)
        request.queued_since = time.monotonic()
        self.queues.add(request)

    def next_step(self, prompt_limit: int | None = None) -> ScheduledStep | None:
        """Schedule running requests, then admit waiting ones while the token budget, slots and
        blocks suffice.

        prompt_limit   the most tokens of prompts, at least 1; None: as many as the budget allows

        None if there is nothing to schedule, or not before a step in flight has finished. Pooling
        steps alternate with generation steps.
        """
        kinds = (not self._pooled_last, self._pooled_last) if self.queues.num_pooled else (False,)
        for pooled in kinds:
            in_flight = self._schedule(pooled, prompt_limit or self.max_num_batched_tokens)
            if in_flight is not None:
                self._pooled_last = pooled
                self._in_flight.append(in_flight)
                return in_flight.step
        assert self._in_flight or not self.requests or self.request_errors.failed, (
            "there are requests, but none can be scheduled"
        )
        return None

    def finish_step(
        self, step: ScheduledStep, tokens: Sequence[Sequence[int]], decoded: Sequence[int] = ()
    ) -> list[Output]:
        """Append the sampled tokens and return an Output for each request with new ones.

        tokens    for each chunk: the accepted tokens of its draft and one more; () if it does not
                  sample
        decoded   the token of each decode row

        Requests that were aborted or finished while the step ran are skipped.
        """
        in_flight = self._in_flight.popleft()
        assert in_flight.step is step, "steps finish in the order in which they were scheduled"
        assert (len(tokens), len(decoded)) == (len(step.chunks), step.num_decoding), (
            f"{len(tokens)} token lists and {len(decoded)} tokens, expected "
            f"{len(step.chunks)} and {step.num_decoding}"
        )
        outputs = self._finish_chunks(in_flight, tokens) + self._finish_rows(in_flight, decoded)
        for (_, row), request, end, admission in in_flight.snapshots:
            assert self.snapshots is not None
            failed = request.id in self.request_errors.failed
            self.counters.snapshots += self.snapshots.finish(
                row, None if failed else request, end, admission
            )
        return outputs

    def undo_step(self, step: ScheduledStep) -> None:
        """Revert the last scheduled step, which failed before or while it ran."""
        in_flight = self._in_flight.pop()
        assert in_flight.step is step, "only the last step can be undone"
        self.queues.undo_take(step.released)
        self.images.undo(step.images, step.dropped)
        for (_, row), *_ in in_flight.snapshots:
            assert self.snapshots is not None
            self.snapshots.drop(row)
        starts = [chunk.start for chunk in step.chunks] + [*step.decoding.starts]
        for (request, chunk), start in zip(in_flight.requests, starts, strict=True):
            request.num_in_flight -= chunk is None or chunk.num_samples > 0
            if request.slot is not None:  # not preempted, nor ended
                self.chunks.undo(request, start, chunk)
                if start and self.state_rows is not None:
                    self._preempt(request)

    def abort(self, request_id: str, reason: FinishReason = "abort") -> bool:
        """Remove a request and free its blocks; False if the id is unknown (it may just have
        finished).
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = reason
        self._remove(request)
        return True

    def check(self) -> None:
        """Assert the invariants between two calls."""
        self.pool.check()
        self.pixels.check([image for request in self.requests.values() for image in request.images])
        self.images.check()
        self.prefixes.check()
        if self.snapshots is not None:
            copies = [copy for in_flight in self._in_flight for copy in in_flight.step.snapshots]
            self.snapshots.check({row for _, row in copies})
        self.queues.check()
        assert self.pool.owners == {request.id for request in self.running}, (
            "running requests and block owners differ"
        )
        for request in (*self.running, *self.waiting):
            self.chunks.check(request)
        expected = sum(in_flight.num_sampling for in_flight in self._in_flight)
        counted = sum(request.num_in_flight for request in (*self.running, *self.waiting))
        assert expected == counted, "num_in_flight is wrong"

    def _schedule(self, pooled: bool, prompt_limit: int) -> StepInFlight | None:
        """The next generation or pooling step; None if it would be empty."""
        builder = StepInFlight(pooled, self.max_num_batched_tokens, prompt_limit)
        if self.queues.by_priority:
            self._preempt_for_waiting(pooled)
        self.images.begin(computed_in_part(self.running))
        preempted = self.counters.preemptions
        self._schedule_running(builder)
        if preempted == self.counters.preemptions:
            self._schedule_waiting(builder)
        if not (builder.entries or builder.rows):
            return None
        images, dropped = self.images.end()
        self.counters.images_encoded += len(images)
        builder.step = ScheduledStep(
            tuple([chunk for *_, chunk in builder.entries]),
            pooled,
            self.queues.take_released(),
            images,
            dropped,
            decoding=DecodeRows(
                tuple([request.slot for request in builder.rows if request.slot is not None]),
                tuple([request.computed - 1 for request in builder.rows]),
                tuple(builder.blocks),
            ),
            snapshots=tuple([copy for copy, *_ in builder.snapshots]),
        )
        return builder

    def _schedule_running(self, builder: StepInFlight) -> None:
        """Add decode rows and chunks of running requests, in order."""
        block_size = self.pool.block_size
        for request in list(self.running):
            if not builder.budget or request.slot is None:  # preempted, and so are all after it
                return
            if request.num_in_flight:
                start = request.computed
                # One token is to be computed, unless it is the last one or a draft is verified.
                if (
                    not builder.pooled
                    and not request.draft
                    and start < request.max_length - 1
                    and (start % block_size or self._reserve_row(builder, request))
                ):
                    builder.rows.append(request)
                    builder.budget -= 1
                    request.computed = start + 1
                    request.num_in_flight += 1
                    if self.snapshots is not None and not request.computed % block_size:
                        self._take_snapshot(builder, request)
                continue
            if not builder.accepts(request):
                continue
            count = self._num_new_tokens(request, builder.most_tokens(request))
            if count and self._reserve(request, self._ahead(request.computed + count)):
                self._add_chunk(builder, request, count)

    def _reserve_row(self, builder: StepInFlight, request: Request) -> bool:
        """Reserve the block that begins with the next token. False if the request was preempted, or
        has failed.
        """
        if not self._reserve(request, request.computed + 1):
            return False
        blocks = self.request_errors.run(
            request.id, "scheduling it", self.pool.take_new_blocks, request.id
        )
        if blocks is not None and request.slot is not None:
            builder.blocks.append((request.slot, blocks))
        return blocks is not None

    def _schedule_waiting(self, builder: StepInFlight) -> None:
        """Admit waiting requests in order, up to the first one that does not fit. Those whose first
        image must wait are passed by others, but not by others with images.
        """
        image_waits, unhashed = False, MOST_HASHED
        for request in list(self.waiting):
            if not builder.budget or builder.prompts <= 0 or not self.queues.has_slot:
                return
            if request.num_in_flight or not builder.accepts(request):
                continue
            is_new = not request.keys
            if self.prefixes.must_wait(request):
                unhashed -= len(request.tokens) * is_new
                if unhashed <= 0:
                    return
                continue
            if image_waits and request.images:
                continue
            # Admitted only for a chunk: the state from which it starts is not kept for a later one.
            if request.images and self._awaits_image(request):
                image_waits = True
                continue
            most = builder.most_tokens(request)
            if not self._admit(request, most):
                return
            self._add_chunk(builder, request, self._num_new_tokens(request, most))

    def _add_chunk(self, builder: StepInFlight, request: Request, count: int) -> None:
        chunk = self.request_errors.run(
            request.id, "scheduling it", self.chunks.make, request, count
        )
        if chunk is not None:
            builder.add(request, chunk)
            if self.snapshots is not None and chunk.num_samples <= 1:
                self._take_snapshot(builder, request)

    def _take_snapshot(self, builder: StepInFlight, request: Request) -> None:
        """Copy the state after all that the request has computed, if that is due."""
        assert self.snapshots is not None
        row = self.request_errors.run(
            request.id, "scheduling it", self.snapshots.take, request, request.computed
        )
        if row is not None and request.slot is not None:
            copy = request.slot, row
            builder.snapshots.append((copy, request, request.computed, request.num_admissions))

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        """Number of tokens of the request to schedule; 0 if the next one belongs to an image that
        this step cannot encode. May shorten the draft.
        """
        due = self.snapshots is not None and self.snapshots.due(request, request.length)
        if request.draft and due:
            request.draft = ()  # the state after it would be that of rejected tokens, too
        count = min(request.pending + len(request.draft), budget)
        if request.scores_prompt and request.scored < request.num_prompt - 1:
            count = min(count, MOST_SCORED_ROWS)
        ahead = [at - request.computed for at in request.snapshot_points if at > request.computed]
        count = min([count, *ahead])
        count = self._take_images(request, count)
        if count < request.pending + len(request.draft):
            request.draft = request.draft[: max(count - request.pending, 0)]
        return count

    def _take_images(self, request: Request, count: int) -> int:
        """How many of the next `count` tokens can be computed: those before the first image whose
        embeddings this step cannot have. The images of the others are in the step.
        """
        if not request.images:
            return count
        count, num_held = self.images.take_rows(request, count)
        self.counters.image_cache_hits += num_held
        return count

    def _awaits_image(self, request: Request) -> bool:
        """Whether the first token that this waiting request would compute belongs to an image that
        the step cannot encode.
        """
        start = self.prefixes.num_cached_blocks(request) * self.pool.block_size
        return not self.images.can_compute(request, start)

    def _admit(self, request: Request, budget: int) -> bool:
        """Give a waiting request a slot, its cached prefix, and blocks for all its tokens, even if
        they take several steps, so that prefill is not preempted. False if there are not enough
        blocks.
        """
        num_cached = self.prefixes.num_cached_blocks(request)
        computed = num_cached * self.pool.block_size
        now = computed + min(len(request.tokens) - computed, budget)
        ahead = self._ahead(len(request.tokens))
        if not self.pool.admit(request.id, request.keys[:num_cached], self._ahead(now), ahead):
            return False
        if not request.num_admissions:
            request.queue_seconds = time.monotonic() - request.queued_since
            request.num_cached = computed
            self.counters.prefix_queries += len(request.tokens) if self.pool.shares else 0
            self.counters.prefix_hits += computed
        self.queues.start(request)
        request.num_admissions += 1
        request.admission_sent = False
        request.computed = computed
        self.prefixes.start(request, num_cached)
        self.counters.snapshot_hits += self.snapshots is not None and num_cached > 0
        return True

    def _preempt_for_waiting(self, pooled: bool) -> None:
        """Preempt running requests for waiting ones of higher priority."""
        for request in list(self.waiting):
            if not self.running or self.running[-1].priority <= request.priority:
                return
            if (
                request.num_in_flight
                or (request.pooling is not None) != pooled
                or self.prefixes.must_wait(request)
            ):
                continue
            while (
                self.running
                and self.running[-1].priority > request.priority
                and not self._fits(request)
            ):
                self._preempt(self.running[-1])
            if not self._fits(request):
                return

    def _fits(self, request: Request) -> bool:
        if not self.queues.has_slot:
            return False
        num_cached = self.prefixes.num_cached_blocks(request)
        now = min(
            num_cached * self.pool.block_size + self.max_num_batched_tokens, len(request.tokens)
        )
        ahead = self._ahead(len(request.tokens))
        return self.pool.has_room(request.keys[:num_cached], self._ahead(now), ahead)

    def _ahead(self, num_tokens: int) -> int:
        """Number of tokens for which to reserve blocks, to compute the first num_tokens."""
        return min(num_tokens + self.lookahead, self.max_len)

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        """Reserve blocks for num_tokens, preempting from the end of `running`. False if the request
        itself was preempted.
        """
        while not self.pool.reserve(request.id, num_tokens):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._release(request)
        self.queues.stop(request)
        request.computed = 0
        request.draft = ()
        self.counters.preemptions += 1

    def _remove(self, request: Request) -> None:
        """Remove a finished or aborted request."""
        if request.slot is not None:
            self._release(request)
        self.pixels.remove(request.images)
        request.images = ()
        self.queues.remove(request)

    def _release(self, request: Request) -> None:
        """Free the blocks of a running request."""
        self.pool.release(request.id)
        self.prefixes.stop(request)

    def _finish_rows(self, in_flight: StepInFlight, decoded: Sequence[int]) -> list[Output]:
        """The output of each decode row. Few calls, because there is one for every token."""
        outputs: list[Output] = []
        starts, block_size = in_flight.step.decoding.starts, self.pool.block_size
        borders = self.pool.borders
        for request, start, token in zip(in_flight.rows, starts, decoded, strict=True):
            if request.finish_reason is not None:
                continue
            request.num_in_flight -= 1
            try:
                request.tokens.append(token)
                if token in request.last_ids or start + 2 == request.max_length:
                    request.finish()
                if (start + 1) % block_size in borders and request.slot is not None:
                    self.chunks.cache_and_trim(request, start + 1)
                reason = request.finish_reason
                if reason is not None:
                    self._remove(request)
                cached, seconds = request.num_cached, request.queue_seconds
                output = Output(request.id, (token,), reason, request.stop_reason, cached, seconds)
                outputs.append(output)
            except BaseException as error:  # as in RequestErrors.run
                self.request_errors.fail(request.id, "appending its new tokens", error)
        self.counters.generated_tokens += len(outputs)
        return outputs

    def _finish_chunks(
        self, in_flight: StepInFlight, tokens: Sequence[Sequence[int]]
    ) -> list[Output]:
        """The outputs of chunks."""
        outputs = []
        for (request, admission, chunk), new in zip(in_flight.entries, tokens, strict=True):
            if request.finish_reason is None:
                output = self.request_errors.run(
                    request.id,
                    "appending its new tokens",
                    self._finish_chunk,
                    request,
                    chunk,
                    admission,
                    new,
                )
                outputs += [output] if output is not None else []
        return outputs

    def _finish_chunk(
        self, request: Request, chunk: Chunk, admission: int, new: Sequence[int]
    ) -> Output | None:
        added = self.chunks.finish(request, chunk, admission, new)
        if request.finish_reason is not None:
            self._remove(request)
        if added is None:
            return None
        queued = request.num_cached, request.queue_seconds
        return Output(request.id, added, request.finish_reason, request.stop_reason, *queued)
