"""Reads the images of requests, and has them decoded and prepared in processes.

Images of all requests are processed at once, so that they share the processors' time; few of one
request, and few large ones, so that these do not delay other images.
"""

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from atomc.runtime.images.content_parts import ImageSource
from atomc.runtime.images.decode import MAX_PIXELS
from atomc.runtime.images.image_decoder import ImageDecoder, LargeImage
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.media_access import MediaAccess, is_data_url, is_web_url, real_folders
from atomc.runtime.images.web_fetch import WebFetch
from atomc.runtime.requests.request import PromptImage
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.http.responses import invalid
from atomc.runtime.server.service.image_budget import ImageReservation

# Images at once: of all requests, of one request, and of more than MANY_PIXELS pixels, which take
# up to two gigabytes each while they are decoded and resized.
DECODES, REQUEST_DECODES, LARGE_DECODES = 16, 4, 2
MANY_PIXELS = 2**22
# Waiting for another host takes no CPU time.
FETCHES = 16


@dataclass
class RequestLimits:
    """What the images of one request may take. Thread-safe.

    max_len       tokens of the model's context
    tokens        those left for images
    file_bytes    bytes left for files that are not in the body
    reservation   for the prepared images
    turn          to process one image
    """

    max_len: int
    tokens: int
    file_bytes: int
    reservation: ImageReservation
    turn: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(REQUEST_DECODES), init=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take_file(self, num_bytes: int) -> None:
        with self._lock:
            self.file_bytes -= num_bytes
            if self.file_bytes < 0:
                raise ImageError("all image files of the request together exceed --max-body-bytes")

    def take_patches(self, num_tokens: int, num_bytes: int) -> None:
        with self._lock:
            if num_tokens > self.tokens:
                raise ImageError(
                    f"it has {num_tokens} tokens, and {self.tokens} of the model's maximum context "
                    f"length of {self.max_len} tokens are left: resize it",
                    "context_length_exceeded",
                )
            self.tokens -= num_tokens
        self.reservation.add(num_bytes)


class ImageReader:
    """access: what images may be read from."""

    def __init__(self, decoder: ImageDecoder, access: MediaAccess) -> None:
        self.decoder, self.access = decoder, access
        # They wait for worker processes and files.
        self._threads = ThreadPoolExecutor(2 * (DECODES + LARGE_DECODES), "image")
        self._fetches = ThreadPoolExecutor(FETCHES, "image fetch")
        self._fetching = asyncio.Semaphore(FETCHES)
        self._decoding = asyncio.Semaphore(DECODES)
        self._decoding_large = asyncio.Semaphore(LARGE_DECODES)

    async def prepare(
        self, sources: Sequence[ImageSource], limits: RequestLimits
    ) -> list[PromptImage]:
        """The prepared images. Raises a 400 for the first that cannot be used, and a 429 for too
        many bytes of all requests.
        """
        tasks = [asyncio.create_task(self._prepare_one(source, limits)) for source in sources]
        try:
            for number, task in enumerate(tasks, 1):
                try:
                    await task
                except ImageError as error:
                    name = f"image {number} of {len(tasks)}" if len(tasks) > 1 else "the image"
                    raise invalid(f"{name}: {error}", "messages", error.code) from error
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare_one(self, source: ImageSource, limits: RequestLimits) -> PromptImage:
        if not isinstance(source, str):
            raise ImageError(f"it is a {type(source).__name__}, expected a URL")
        async with limits.turn:
            if is_data_url(source):
                return await self._decode(source, limits)
            loop = asyncio.get_running_loop()
            if not is_web_url(source):
                data = await loop.run_in_executor(self._threads, self._read, source, limits)
                return await self._decode(data, limits)
            # Until it is decoded, so that the bytes of at most FETCHES images are in memory.
            async with self._fetching:
                data = await loop.run_in_executor(self._fetches, self._read, source, limits)
                return await self._decode(data, limits)

    def _read(self, url: str, limits: RequestLimits) -> bytes:
        data = self.access.read(url)
        limits.take_file(len(data))
        return data

    async def _decode(self, source: str | bytes, limits: RequestLimits) -> PromptImage:
        """source: a data: URL, or a file."""
        try:
            async with self._decoding:
                return await self._decode_within(MANY_PIXELS, source, limits)
        except LargeImage:
            async with self._decoding_large:
                return await self._decode_within(MAX_PIXELS, source, limits)

    async def _decode_within(
        self, max_pixels: int, source: str | bytes, limits: RequestLimits
    ) -> PromptImage:
        loop = asyncio.get_running_loop()
        connection = await loop.run_in_executor(self._threads, self.decoder.connect)
        prepare = partial(
            self.decoder.prepare,
            connection,
            source,
            limits.take_patches,
            max_pixels=max_pixels,
            max_bytes=self.access.max_bytes,
        )
        try:
            return await loop.run_in_executor(self._threads, prepare)
        except asyncio.CancelledError:
            with suppress(OSError):  # already closed
                connection.shutdown(socket.SHUT_RDWR)
            raise


def image_reader(decoder: ImageDecoder, config: ServerConfig) -> ImageReader:
    """With what the flags allow. Raises ValueError for a folder that is none."""
    hosts = frozenset(map(str.lower, config.allowed_media_domains))
    access = MediaAccess(
        real_folders(config.allowed_local_media_path),
        web=WebFetch(hosts) if hosts else None,
        max_bytes=config.max_body_bytes,
    )
    return ImageReader(decoder, access)
