"""What the engine needs of whatever runs its steps.

`atomc.runtime.worker.Worker` runs them in this process. Another executor may send them elsewhere: a
step is plain data (atomc.runtime.step), and so is a Result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atomc.runtime.capacity import Capacity
from atomc.runtime.request_errors import RequestError
from atomc.runtime.sampling.logprobs import TokenLogprobs
from atomc.runtime.step import ScheduledStep


@dataclass(frozen=True)
class Limits:
    """What the scheduler may give to requests.

    capacity         blocks of the caches
    windows          for each group of blocks, how many of the last tokens are read; 0: all
    max_num_seqs     slots
    max_num_batched_tokens   of one step
    no_prefix_cache  why blocks cannot be shared; empty: they can
    can_roll_back    whether a step that failed may be launched again. False: the sequences in it
                     begin again, because it may have advanced their state already
    """

    capacity: Capacity
    windows: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    no_prefix_cache: str = ""
    can_roll_back: bool = True


@dataclass(frozen=True)
class Result:
    """What one chunk gave: the drawn tokens with their log-probabilities if asked for, those of
    tokens of the prompt, and a pooled hidden state; or why the request failed."""

    tokens: Sequence[int] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    scores: Sequence[TokenLogprobs] = ()
    embedding: tuple[float, ...] | None = None
    error: RequestError | None = None


@dataclass(frozen=True)
class StepCounts:
    """How many steps ran how, and the rows of those that ran as a graph; see Stats."""

    steps: Mapping[str, int]
    graph_rows: int
    graph_padding: int


class Launched(Protocol):
    """A step that runs. What it computes stays on the device until `results`."""

    def sample(self, mask: Tensor | None = None) -> None:
        """Sample the step's tokens; nothing for a step of hidden states. Called once, before the
        next step is launched.

        mask  [num_samples, W] i32, the allowed tokens (see Sampler)
        """

    def results(self) -> list[Result]:
        """One for each chunk; waits for the device."""


class Executor(Protocol):
    """Runs steps in the order in which they are launched, several of them at once: the token that a
    step draws last for a slot is fed to the next one.

    An error of one request is in its Result, one of a whole step is raised; the step may then be
    launched again, unless limits.can_roll_back says otherwise.
    """

    limits: Limits

    @property
    def pools(self) -> bool:
        """Whether steps of hidden states can be launched at once: what they need is compiled."""

    def launch(self, step: ScheduledStep) -> Launched:
        """Start to compute the step's logits, or its pooled hidden states."""

    def prepare_pooling(self) -> None:
        """Compile the model once more, over the same weights and caches, without its head; steps
        may run meanwhile.

        Raises ValueError for a model whose head is not known.
        """

    def check(self) -> None:
        """Raise RunError if the weights of a user's module were replaced."""

    def counts(self) -> StepCounts:
        """Since the start, or since `forget_counts`."""

    def forget_counts(self) -> None: ...
