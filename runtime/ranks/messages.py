"""Messages between rank 0 and the other ranks, encoded as msgpack.

Rank 0 numbers its commands; all ranks execute them in this order.
"""

import zlib
from typing import Literal

import msgspec

from atomc.runtime.execution.executor import StepResults
from atomc.runtime.scheduling.step import ScheduledStep

# Before the first command, a rank is done with these numbers when it has imported torch, and when
# its Worker is complete.
IMPORTED, LOADED = 0, 1
FIRST_COMMAND = 2
# All ranks do these at once, which takes long, or is rare.
ControlMethod = Literal["warm_up", "prepare_pooling", "sleep", "wake_up", "forget_counts", "counts"]


class Launch(msgspec.Struct, tag=True):
    """Launch a step, which later commands name by this number."""

    number: int
    step: ScheduledStep


class SampleStep(msgspec.Struct, tag=True):
    """Sample a step's tokens. mask: the bytes of [num_rows, W] i32; None: all are allowed."""

    number: int
    step: int
    mask: bytes | None = None
    num_rows: int = 0


class Collect(msgspec.Struct, tag=True):
    """Read a step's results."""

    number: int
    step: int


class Control(msgspec.Struct, tag=True):
    """Call this method of the Worker; answered with Done. "prepare_pooling" runs in a thread, while
    steps run.
    """

    number: int
    method: ControlMethod


class StopRank(msgspec.Struct, tag=True):
    """End the process."""

    number: int = 0


Command = Launch | SampleStep | Collect | Control | StopRank


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
    """A command is complete: one that others wait for.

    results      of the step that the command collects: by the last stage of a pipeline, or of the
                 part of a data-parallel rank
    expert_load  tokens of experts, as in StepCounts
    """

    rank: int
    number: int
    results: StepResults | None = None
    expert_load: dict[str, list[int]] = {}


class CommandFailed(msgspec.Struct, tag=True):
    """A command raised an exception. by_user: as in RankFailed."""

    rank: int
    number: int
    message: str
    by_user: bool = False


Report = Pulse | Done | CommandFailed

_encode = msgspec.msgpack.Encoder().encode


def results_digest(before: int, results: StepResults) -> int:
    """The digest after these results, equal in all ranks unless their tokens differ. before: that
    of all earlier ones; 0: there are none.
    """
    of_chunks = [tuple(result.tokens) for result in results.chunks]
    return zlib.crc32(_encode((of_chunks, results.decoded, [*results.errors])), before)
