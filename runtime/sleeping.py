"""What of an engine sleeps, in vLLM's terms, and the error of requests meanwhile."""

from collections.abc import Collection

from atomc.errors import RunError

LEVEL = 1  # of vLLM's levels, the one that keeps weights
TAGS = ("weights", "kv_cache")


class EngineAsleep(RunError):
    """A request while the engine sleeps. retry_after: seconds."""

    retry_after = 5.0

    def __init__(self) -> None:
        super().__init__(
            "the model sleeps, its KV cache is freed: call wake_up (on a server POST /wake_up) "
            "first"
        )


def refuse_level(level: int) -> None:
    """Raise ValueError for a level that is not supported."""
    if level != LEVEL:
        raise ValueError(
            f"sleep: level is {level}, expected {LEVEL}, which frees the KV cache and CUDA graphs; "
            "weights stay where they are"
        )


def refuse_running(number: int) -> None:
    """Raise ValueError if requests wait or run, as many as `number`."""
    if number:
        raise ValueError(
            f"sleep: {number} requests wait or run, expected none: call it when they have ended, "
            "or abort them first"
        )


def wakes_state(tags: Collection[str] | None) -> bool:
    """Whether these tags of wake_up name what sleeps; None: all tags. Raises ValueError for unknown
    ones.
    """
    if unknown := sorted(set(tags or ()) - set(TAGS)):
        raise ValueError(f"wake_up: tags has {', '.join(unknown)}, expected {' and '.join(TAGS)}")
    return tags is None or "kv_cache" in tags
