"""Limits the memory of images that are being prepared.

Images grow when they are prepared: a file of a few bytes can have millions of pixels. When the
engine has accepted them, its own limit applies (image_queue_bytes).
"""

import threading
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from atomc.runtime.images.image_error import ImageError
from atomc.runtime.server.http.responses import invalid, unavailable

RETRY_SECONDS = 1
STATE = "image_reservation"


@dataclass
class ImageReservation:
    """The bytes of one request's images. Thread-safe."""

    _budget: "ImageBudget"
    _held: int = 0
    _ended: bool = False

    def add(self, num_bytes: int) -> None:
        """Raises a 400 if this request alone is above the limit, a 429 if all together are."""
        limit = self._budget.max_bytes
        with self._budget.lock:
            if self._ended:  # the client has disconnected, and a thread still prepares an image
                raise ImageError("the request has ended")
            if self._held + num_bytes > limit:
                raise invalid(
                    f"the images of this request exceed the limit of {limit} bytes of pixels: send "
                    "fewer or smaller images",
                    "messages",
                )
            if self._budget.bytes_held + num_bytes > limit:
                raise unavailable(
                    f"the images of all new requests have {self._budget.bytes_held} bytes of "
                    f"pixels, the limit is {limit}: try again later",
                    "too_many_bytes",
                    RETRY_SECONDS,
                    status=429,
                    kind="overloaded",
                )
            self._held += num_bytes
            self._budget.bytes_held += num_bytes

    def release(self) -> None:
        """Release all bytes; none can be added later."""
        with self._budget.lock:
            self._ended = True
            self._budget.bytes_held -= self._held
            self._held = 0


@dataclass
class ImageBudget:
    """max_bytes: the limit for all requests together."""

    max_bytes: int
    bytes_held: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class ImageBudgetMiddleware:
    """ASGI middleware: gives each request an ImageReservation, which ends with the response."""

    app: ASGIApp
    budget: ImageBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reservation = ImageReservation(self.budget)
        scope.setdefault("state", {})[STATE] = reservation
        try:
            await self.app(scope, receive, send)
        finally:
            reservation.release()


def image_reservation(request: Request) -> ImageReservation:
    reservation: ImageReservation = request.scope["state"][STATE]
    return reservation
