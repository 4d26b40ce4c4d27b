"""Messages between the frontend process and the engine process, encoded as msgpack."""

import msgspec

from atomc.runtime.requests.request import Output, Pooling, PromptImage
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.server.engines.control_calls import ControlCall, Reply

# To the engine


class Submit(msgspec.Struct, tag=True):
    """Generate from these tokens and images, with the LoRA adapter of this name, or pool their
    hidden states.

    The engine replies with Progress.accepted or Progress.refused, then with outputs.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    priority: int = 0
    salt: str | None = None
    pooling: Pooling | None = None
    images: tuple[PromptImage, ...] = ()
    lora: str | None = None


class Abort(msgspec.Struct, tag=True):
    """Abort these requests; no further outputs follow."""

    ids: list[str]


class StopEngine(msgspec.Struct, tag=True):
    """End the process."""


EngineCommand = Submit | Abort | ControlCall | StopEngine

# From the engine


class Started(msgspec.Struct, tag=True):
    """The engine is ready.

    model      class name of the model, and whether it is atomc's or transformers'
    max_len    maximum sequence length in tokens
    kv_tokens  capacity of the KV cache in tokens
    phases     seconds of each phase of the start
    threads    number of CPU threads and the reason, as text; empty on a GPU
    place      where the engine runs, such as "process 2012"
    ranks      where each other rank runs
    """

    model: str
    device: str
    max_len: int
    vocab_size: int | None
    kv_tokens: int
    num_sequences: int
    phases: dict[str, float]
    place: str
    threads: str = ""
    ranks: dict[int, str] = {}


class EngineFailure(msgspec.Struct, tag=True):
    """The engine did not start, or failed; the process exits. by_user: the message describes an
    error a user can fix.
    """

    message: str
    by_user: bool


class Refused(msgspec.Struct):
    """A rejected request.

    retry_after   seconds after which to retry; None: the request can never be accepted
    by_client     the request is the cause, not the engine
    asleep        the engine sleeps
    """

    id: str
    message: str
    retry_after: float | None = None
    by_client: bool = True
    asleep: bool = False


class Progress(msgspec.Struct, tag=True, omit_defaults=True):
    """The results of one iteration of the engine loop.

    ids, tokens   requests that got one token and nothing else, and these tokens: two plain lists,
                  because in most steps these are all requests
    outputs       of the other requests, and the first one of each request; after these tokens
    """

    ids: list[str] = []
    tokens: list[int] = []
    outputs: list[Output] = []
    accepted: list[str] = []
    refused: list[Refused] = []


EngineEvent = Started | EngineFailure | Progress | Reply
