"""What the front process and the engine process say to each other, as msgpack."""

from typing import Literal

import msgspec

from atomc.runtime.request import Output, Pooling
from atomc.runtime.sampling_params import SamplingParams
from atomc.runtime.stats import Stats

# To the engine


class Submit(msgspec.Struct, tag=True):
    """Generate from these tokens, or pool their hidden states.

    Answered by one of Progress.accepted and Progress.refused, then by outputs.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str | None = None
    pooling: Pooling | None = None


class Abort(msgspec.Struct, tag=True):
    """Drop these requests; no output of them follows."""

    ids: list[str]


class Call(msgspec.Struct, tag=True):
    """Answered by a Reply of the same number.

    stats: the Stats, in the Progress that comes with the reply; report: the compiler's report as JSON text;
    start_profile, stop_profile: of torch, written to `folder`.
    """

    number: int
    name: Literal["stats", "report", "start_profile", "stop_profile"]
    folder: str = ""


class Stop(msgspec.Struct, tag=True):
    """End the process."""


Command = Submit | Abort | Call | Stop

# From the engine


class Started(msgspec.Struct, tag=True):
    """The engine is ready.

    model     the name of the model's class, and whether it is ours or that of transformers
    max_len   tokens of the longest sequence; kv_tokens: tokens that the cache holds
    phases    seconds of each part of the start
    threads   how many compute on a CPU and why, in a sentence; empty on a GPU
    """

    model: str
    device: str
    max_len: int
    vocab_size: int | None
    kv_tokens: int
    num_sequences: int
    phases: dict[str, float]
    threads: str = ""


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or broke: the process ends. by_user: the message is what a user can put right."""

    message: str
    by_user: bool


class Refused(msgspec.Struct):
    """A request that was not taken. retry_after: seconds until the queue may have room; None: never. by_client: the
    request is the cause, not the engine."""

    id: str
    message: str
    retry_after: float | None = None
    by_client: bool = True


class Progress(msgspec.Struct, tag=True, omit_defaults=True):
    """What one round of the engine's loop gave."""

    outputs: list[Output] = []
    accepted: list[str] = []
    refused: list[Refused] = []
    stats: Stats | None = None


class Reply(msgspec.Struct, tag=True):
    """What a Call gave, as text; or the sentence why not."""

    number: int
    value: str = ""
    error: str | None = None


Event = Started | Failed | Progress | Reply
