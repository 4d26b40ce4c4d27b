"""Messages between rank 0 and the other ranks, encoded as msgpack.

Rank 0 numbers its commands; all ranks execute them in this order.
"""

import msgspec

from atomc.runtime.execution.executor import Result
from atomc.runtime.scheduling.step import ScheduledStep

# Before the first command, a rank is done with these numbers when it has imported torch, and when
# its Worker is complete.
IMPORTED, LOADED = 0, 1
FIRST_COMMAND = 2


class Launch(msgspec.Struct, tag=True):
    """Launch a step, which later commands name by this number."""

    number: int
    step: ScheduledStep


class Sample(msgspec.Struct, tag=True):
    """Sample a step's tokens. mask: the bytes of [num_rows, W] i32; None: all are allowed."""

    number: int
    step: int
    mask: bytes | None = None
    num_rows: int = 0


class Collect(msgspec.Struct, tag=True):
    """Read a step's results."""

    number: int
    step: int


class WarmUp(msgspec.Struct, tag=True):
    """Worker.warm_up; answered with Done."""

    number: int


class PreparePooling(msgspec.Struct, tag=True):
    """Worker.prepare_pooling in a thread, while steps run; answered with Done."""

    number: int


class Sleep(msgspec.Struct, tag=True):
    """Worker.sleep; answered with Done."""

    number: int


class WakeUp(msgspec.Struct, tag=True):
    """Worker.wake_up; answered with Done."""

    number: int


class ForgetCounts(msgspec.Struct, tag=True):
    """Worker.forget_counts."""

    number: int


class Count(msgspec.Struct, tag=True):
    """Worker.counts; answered with Counts."""

    number: int


class Stop(msgspec.Struct, tag=True):
    """End the process."""

    number: int = 0


Command = (
    Launch
    | Sample
    | Collect
    | WarmUp
    | PreparePooling
    | Sleep
    | WakeUp
    | ForgetCounts
    | Count
    | Stop
)


class Pulse(msgspec.Struct, tag=True):
    """Sent regularly by a thread of its own, also while a step runs.

    began      the last command that the rank has begun
    collected  number of steps whose results it has read; digest: of these results
    """

    rank: int
    began: int
    collected: int
    digest: int


class Done(msgspec.Struct, tag=True):
    """A long command is complete."""

    rank: int
    number: int


class Failed(msgspec.Struct, tag=True):
    """A command raised an exception. by_user: as in RankFailed."""

    rank: int
    number: int
    message: str
    by_user: bool = False


class Results(msgspec.Struct, tag=True):
    """Of the step that command `number` collects: by the last stage of a pipeline, or of the part
    of a data-parallel rank.
    """

    rank: int
    number: int
    results: list[Result]


class Counts(msgspec.Struct, tag=True):
    """What command `number` asks for: tokens of experts, as in StepCounts."""

    rank: int
    number: int
    expert_load: dict[str, list[int]]


Report = Pulse | Done | Failed | Results | Counts
