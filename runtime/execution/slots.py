"""State of the running requests in a worker, one per slot, updated from the steps alone."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from atomc.runtime.requests.request_errors import RequestError, wrap_error
from atomc.runtime.requests.sample_spec import GREEDY, RequestCounts, SampleSpec
from atomc.runtime.sampling.token_counts import TokenCounts
from atomc.runtime.scheduling.step import Admission, Chunk, ScheduledStep

P = ParamSpec("P")
T = TypeVar("T")


class SlotState:
    """A request in its slot.

    only_largest   as in SamplingParams
    counts   token counts, if it has penalties
    total    sum of the prompt's hidden states so far [D], for mean pooling
    error    why the request failed: it is its result, and further tokens are ignored
    """

    def __init__(self, request_id: str, request: Admission) -> None:
        self.request_id = request_id
        self.request = request
        self.only_largest = request.params.only_largest
        self.counts = (
            RequestCounts(request.num_prompt, list(request.tokens))
            if request.params.penalized
            else None
        )
        self.total: Tensor | None = None
        self.error: RequestError | None = None

    def specs(self, count: int, end: int, draft: tuple[int, ...] = ()) -> list[SampleSpec]:
        """How `count` tokens are sampled after the tokens before position `end`, the last of which
        are the draft; greedy if the request has failed.
        """
        of = self.request
        params, counts = (of.params, self.counts) if self.error is None else (GREEDY, None)
        index = end - len(draft) - of.num_prompt
        return [
            SampleSpec(params, of.seed, index + i, of.num_prompt, of.eos_ids, draft[:i], counts)
            for i in range(count)
        ]

    def run(self, doing: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `work` returns; None if it raised, which fails the request. doing: as in
        `wrap_error`.
        """
        try:
            return work(*args, **kwargs)
        except BaseException as error:  # a panic in Rust is no Exception; `fail` raises the rest
            self.fail(doing, error)
            return None

    def fail(self, doing: str, error: BaseException) -> None:
        """Raises the error itself if it is not recoverable."""
        failure = wrap_error(self.request_id, doing, error)
        self.error = self.error or failure


class Slots:
    """The states of all slots. A request's first chunk creates its state; `released` of a step
    drops it.
    """

    def __init__(self, counts: TokenCounts) -> None:
        self.counts = counts
        self.states: dict[int, SlotState] = {}

    def update(self, step: ScheduledStep) -> list[SlotState]:
        """Apply the admissions and released slots of a step; returns the state of each chunk, then
        of each decode row. Idempotent.
        """
        for slot in step.released:
            self.release(slot)
        of_chunks = [self._state(chunk) for chunk in step.chunks]
        return of_chunks + [self.states[slot] for slot in step.decoding.slots]

    def release(self, slot: int) -> None:
        state = self.states.pop(slot, None)
        if state is not None and state.counts is not None:
            self.counts.release(state.counts)

    def _state(self, chunk: Chunk) -> SlotState:
        if chunk.admission is not None:
            self.release(chunk.slot)
            self.states[chunk.slot] = SlotState(chunk.request_id, chunk.admission)
        state = self.states[chunk.slot]
        assert state.request_id == chunk.request_id, (
            f"slot {chunk.slot} belongs to {state.request_id}, not {chunk.request_id}"
        )
        if state.counts is not None and not state.counts.length:
            num_known = len(chunk.tokens) - len(chunk.draft)
            state.counts.tokens[chunk.start :] = chunk.tokens[:num_known]
        return state


def samples(
    step: ScheduledStep, states: Sequence[SlotState]
) -> list[tuple[SlotState, int, int, tuple[int, ...]]]:
    """For each chunk, then for each decode row: its state, and arguments of `SlotState.specs`."""
    chunks = zip(states, step.chunks, strict=False)
    rows = zip(states[len(step.chunks) :], step.decoding.starts, strict=True)
    return [
        *[(state, chunk.num_samples, chunk.end, chunk.draft) for state, chunk in chunks],
        *[(state, 1, start + 1, ()) for state, start in rows],
    ]


def sample_specs(step: ScheduledStep, states: Sequence[SlotState]) -> list[SampleSpec]:
    """One for each token that the step samples, in the order of its rows."""
    of_states = samples(step, states)
    return [spec for state, n, end, draft in of_states for spec in state.specs(n, end, draft)]
