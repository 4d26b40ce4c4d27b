"""A LoRA adapter that a worker has loaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter, as loaded once: it is another one after it was unloaded and loaded again.

    number    its place in the adapters of a program, which another one has after it
    identity  differs between all loads of one engine
    folder    from which it was loaded
    """

    name: str
    number: int
    identity: int
    folder: str
