"""Errors that end one request and leave the engine running."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from atomc.torch_compat.exceptions import device_failed, is_failure

log = logging.getLogger("atomc")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RequestError:
    """Why a request failed. by_client: caused by the request itself, otherwise by the model or the
    engine.
    """

    message: str
    by_client: bool = False


class RequestFailed(Exception):
    """One request failed; the other requests continue."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class TokenizerError(ValueError):
    """A model's tokenizer failed on a text, or on tokens."""


def is_recoverable(error: BaseException) -> bool:
    """Whether the engine can continue after the error: not for KeyboardInterrupt or SystemExit, nor
    for errors of the device.
    """
    return not device_failed(error) and is_failure(error)


def wrap_error(request_id: str, doing: str, error: BaseException) -> RequestError:
    """The RequestError for this exception, which is logged. Re-raises one that is not recoverable.

    doing   completes "the engine failed while ..."
    """
    if not is_recoverable(error):
        raise error
    if isinstance(error, RequestFailed):
        request_error = error.error
        log.log(
            logging.INFO if request_error.by_client else logging.ERROR,
            "request %s failed: %s",
            request_id,
            request_error.message,
        )
        return request_error
    if isinstance(error, TokenizerError):
        log.error("request %s failed while %s: %s", request_id, doing, error)
        return RequestError(str(error))
    log.error("request %s failed while %s", request_id, doing, exc_info=error)
    return RequestError(f"the engine failed while {doing}: {type(error).__name__}; see its log")


class RequestErrors:
    """Runs work for a single request; collects the errors by request id until `take` is called."""

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
        except BaseException as error:  # a panic in Rust is no Exception; `fail` raises the rest
            self.fail(request_id, doing, error)
            return None

    def fail(self, request_id: str, doing: str, error: BaseException) -> None:
        """Fail the request with this error. Raises the error itself unless it is recoverable."""
        self.failed.setdefault(request_id, wrap_error(request_id, doing, error))

    def take(self) -> dict[str, RequestError]:
        """Errors since the last call, by request id."""
        failed, self.failed = self.failed, {}
        return failed
