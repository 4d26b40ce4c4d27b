"""An executor whose worker runs in another process: steps and masks go there as bytes, results come
back as bytes.
"""

import multiprocessing
from multiprocessing.connection import Connection

import msgspec
import torch

from atomc.runtime.config import EngineConfig
from atomc.runtime.executor import Limits, Result
from atomc.runtime.phases import Phases
from atomc.runtime.step import ScheduledStep
from atomc.runtime.worker import Worker


class Launch(msgspec.Struct, tag=True):
    step: ScheduledStep


class Sample(msgspec.Struct, tag=True):
    """Of the step launched last; mask [num_rows, W] i32."""

    mask: bytes | None = None
    num_rows: int = 0


class Collect(msgspec.Struct, tag=True):
    """The oldest step's results are sent."""


class Pool(msgspec.Struct, tag=True):
    """Prepare pooling."""


encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(Launch | Sample | Collect | Pool).decode
results = msgspec.msgpack.Decoder(list[Result]).decode


def serve(config: EngineConfig, pipe: Connection) -> None:
    """The life of the other process: it ends when the pipe does."""
    worker = Worker(config, Phases((), progress=False), progress=False)
    worker.warm_up()
    pipe.send_bytes(encode(worker.limits))
    launched = []
    while True:
        try:
            match decode(pipe.recv_bytes()):
                case Launch(step):
                    launched.append(worker.launch(step))
                case Sample(mask, num_rows):
                    bits = None
                    if mask is not None:
                        bits = torch.frombuffer(bytearray(mask), dtype=torch.int32).view(
                            num_rows, -1
                        )
                    launched[-1].sample(bits)
                case Collect():
                    pipe.send_bytes(encode(launched.pop(0).results()))
                case Pool():
                    worker.prepare_pooling()
        except EOFError:
            return


class RemoteStep:
    def __init__(self, executor: "RemoteExecutor") -> None:
        self.executor = executor

    def sample(self, mask: torch.Tensor | None = None) -> None:
        self.executor.send(Sample() if mask is None else Sample(mask.numpy().tobytes(), len(mask)))

    def results(self) -> list[Result]:
        self.executor.send(Collect())
        return results(self.executor.pipe.recv_bytes())


class RemoteExecutor:
    """Close it at the end."""

    pools = False

    def __init__(self, config: EngineConfig) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(config, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.limits = msgspec.msgpack.decode(self.pipe.recv_bytes(), type=Limits)
        self.steps = 0

    def send(self, message: msgspec.Struct) -> None:
        self.pipe.send_bytes(encode(message))

    def launch(self, step: ScheduledStep) -> RemoteStep:
        self.steps += 1
        self.send(Launch(step))
        return RemoteStep(self)

    def prepare_pooling(self) -> None:
        self.send(Pool())

    def check(self) -> None:
        """Nobody replaces weights there."""

    def close(self) -> None:
        self.pipe.close()
        self.process.join(timeout=30)
