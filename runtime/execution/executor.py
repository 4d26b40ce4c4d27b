"""What the engine needs of whatever runs its steps.

`atomc.runtime.execution.worker.Worker` runs them in this process,
`atomc.runtime.ranks.executor.RankExecutor` in several: a step is plain data
(atomc.runtime.scheduling.step), and so is a Result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from atomc.runtime.execution.capacity import Capacity
from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.requests.request_errors import RequestError
from atomc.runtime.scheduling.image_limits import ImageLimits
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.stats import StepCounts
from atomc.runtime.scheduling.step import ScheduledStep


@dataclass(frozen=True)
class Limits:
    """Resources of an executor that the scheduler manages.

    capacity         blocks of the caches
    windows          attention window of each block group in tokens; 0: all tokens
    max_num_seqs     number of slots
    max_num_batched_tokens   maximum tokens of a step
    no_prefix_cache  why blocks cannot be shared; empty if they can
    images           None: the model takes no images
    state_rows       the rows of state per sequence that cannot go back to an earlier token: after a
                     failed step, its sequences start over, because it may have advanced their
                     state; after a rejected draft, they continue from the state before it. None:
                     computed tokens can be computed again
    """

    capacity: Capacity
    windows: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    no_prefix_cache: str = ""
    images: ImageLimits | None = None
    state_rows: StateRows | None = None


@dataclass(frozen=True)
class Result:
    """Result of one chunk, or what a decode row gives besides its token.

    tokens      sampled tokens, with logprobs if requested
    scores      log-probabilities of the chunk's prompt tokens
    embedding   pooled hidden state
    draft       draft tokens after the last of `tokens`, by a draft model
    """

    tokens: Sequence[int] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    scores: Sequence[TokenLogprobs] = ()
    embedding: tuple[float, ...] | None = None
    draft: tuple[int, ...] = ()


@dataclass
class StepResults:
    """Results of one step.

    chunks    one for each chunk
    decoded   the token of each decode row
    of_rows   what else decode rows give, by request id
    errors    why requests failed, by request id
    """

    chunks: list[Result] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    of_rows: dict[str, Result] = field(default_factory=dict)
    errors: dict[str, RequestError] = field(default_factory=dict)

    @property
    def has_values(self) -> bool:
        """Whether the step gave anything for which the host has waited."""
        values = (x.tokens or x.scores or x.embedding for x in self.chunks)
        return bool(self.decoded) or any(values)

    def add(self, other: "StepResults") -> None:
        """Add the results of another part of the step."""
        self.chunks += other.chunks
        self.decoded += other.decoded
        self.of_rows |= other.of_rows
        self.errors |= other.errors


class Launched(Protocol):
    """A launched step. Its results stay on the device until `results` is called."""

    def sample(self, mask: Tensor | None = None) -> None:
        """Sample the step's tokens; does nothing for a pooling step. Called once, before the next
        step is launched.

        mask  [num_samples, W] i32, the allowed tokens (see Sampler)
        """

    def results(self) -> StepResults:
        """Those of the step; waits for the device."""


class Executor(Protocol):
    """Runs steps in launch order; several may be in flight. The last token sampled for a slot is an
    input of the next step.

    An error of a single request is in the StepResults. An error of a whole step is raised; the step
    may be launched again without limits.state_rows.
    """

    limits: Limits

    @property
    def places(self) -> Mapping[int, str]:
        """Where each other rank runs, such as "process 2013"."""

    @property
    def can_pool(self) -> bool:
        """Whether pooling steps can be launched: their program is compiled."""

    def launch(self, step: ScheduledStep) -> Launched:
        """Start to compute the step's logits, or its pooled hidden states."""

    def prepare_pooling(self) -> None:
        """Compile the model without its head, over the same weights and caches. Steps may run
        meanwhile.

        Raises ValueError for a model whose head is not known.
        """

    @property
    def max_loras(self) -> int:
        """How many LoRA adapters it has place for."""

    def write_adapter(self, number: int, folder: str) -> None:
        """Read an adapter into the place with this number, for later steps. Raises ValueError for
        one that cannot be used, which changes nothing.
        """

    def ready(self) -> None:
        """The start is over: from now on, no step compiles anything."""

    def raise_failure(self) -> None:
        """Raise RankFailed if another process of the executor has failed."""

    def check(self) -> bool:
        """Called when a request follows a time without any.

        Whether parameters of a user's module were written since the last call, by in-place
        operations: autograd does not count those on `parameter.data`. Raises RunError if they were
        replaced.
        """

    def sleep(self) -> None:
        """Free the state of all layers, the CUDA graphs and embeddings of images; weights stay. No
        step is in flight, and none is launched until `wake_up`.
        """

    def wake_up(self) -> None:
        """Allocate and capture again what `sleep` has freed; the state is zeroed."""

    def counts(self) -> StepCounts:
        """Since the start, or since `forget_counts`."""

    def forget_counts(self) -> None: ...

    def close(self) -> None:
        """End the other processes of the executor, if it has any."""
