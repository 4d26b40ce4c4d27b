"""Errors that end one request and leave the engine running."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from atomc.torch_compat.exceptions import device_failed

log = logging.getLogger("atomc")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RequestError:
    """Why a request failed. by_client: the request is the cause; otherwise the model, or the
    engine's own code.
    """

    message: str
    by_client: bool = False


class RequestFailed(Exception):
    """One request failed; the other requests continue."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust panicked. pyo3's PanicException is no Exception, and each
    library has its own.
    """
    return type(error).__name__ == "PanicException"


def is_contained(error: BaseException) -> bool:
    """Whether the error may end a request instead of the engine: not one that stops the process or
    is the device's.
    """
    return not device_failed(error) and (isinstance(error, Exception) or is_panic(error))


def contained(request_id: str, doing: str, error: BaseException) -> RequestError:
    """Why the request failed, which is logged. Raises the error itself if it must not be contained.

    doing   completes "the engine failed while ..."
    """
    if not is_contained(error):
        raise error
    if isinstance(error, RequestFailed):
        found = error.error
        log.log(
            logging.INFO if found.by_client else logging.ERROR,
            "request %s failed: %s",
            request_id,
            found.message,
        )
        return found
    log.error("request %s failed while %s", request_id, doing, exc_info=error)
    return RequestError(
        f"the engine failed while {doing}: {type(error).__name__}; its log says more"
    )


class Fence:
    """Runs the steps of the engine that belong to one request, and keeps what went wrong until
    `take` is called.
    """

    def __init__(self) -> None:
        self.failed: dict[str, RequestError] = {}

    def run(
        self, request_id: str, doing: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """What `work` returns; None if it raised, which fails the request.

        doing   completes "the engine failed while ..."
        """
        try:
            return work(*args, **kwargs)
        except BaseException as error:
            self.fail(request_id, doing, error)
            return None

    def fail(self, request_id: str, doing: str, error: BaseException) -> None:
        """Fail the request with this error. Raises the error itself if it must not be contained."""
        self.failed.setdefault(request_id, contained(request_id, doing, error))

    def take(self) -> dict[str, RequestError]:
        """The requests that failed since the last call, and why."""
        failed, self.failed = self.failed, {}
        return failed
