"""Reads and prepares the images of requests in threads, a few at a time."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from atomc.runtime.image_input.content_parts import ImageSource
from atomc.runtime.image_input.decode import decode_image
from atomc.runtime.image_input.image_error import ImageError
from atomc.runtime.image_input.media_access import MediaAccess, is_web_url, real_folders
from atomc.runtime.image_input.processor import ImageProcessor, PreparedImage
from atomc.runtime.image_input.web_fetch import WebFetch
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.errors import invalid
from atomc.runtime.server.image_budget import ImageReservation

# An image of 33 million pixels takes up to a gigabyte while it is decoded and resized.
DECODES = 4
# Waiting for another host takes no CPU time.
FETCHES = 16


@dataclass
class RequestLimits:
    """What the images of one request may take. Thread-safe.

    max_len       tokens of the model's context
    tokens        those left for images
    file_bytes    bytes left for files that are not in the body
    reservation   for the prepared images
    """

    max_len: int
    tokens: int
    file_bytes: int
    reservation: ImageReservation
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

    def __init__(self, processor: ImageProcessor, access: MediaAccess) -> None:
        self.processor, self.access = processor, access
        self._decodes = ThreadPoolExecutor(DECODES, "image")
        self._fetches = ThreadPoolExecutor(FETCHES, "image fetch")
        self._fetching = asyncio.Semaphore(FETCHES)

    async def prepare(
        self, sources: Sequence[ImageSource], limits: RequestLimits
    ) -> list[PreparedImage]:
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

    async def _prepare_one(self, source: ImageSource, limits: RequestLimits) -> PreparedImage:
        loop = asyncio.get_running_loop()
        if not isinstance(source, str):
            raise ImageError(f"it is a {type(source).__name__}, expected a URL")
        if not is_web_url(source):
            return await loop.run_in_executor(self._decodes, self._read_one, source, limits)
        # Until it is decoded, so that the bytes of at most FETCHES images are in memory.
        async with self._fetching:
            data = await loop.run_in_executor(self._fetches, self._read, source, limits)
            return await loop.run_in_executor(self._decodes, self._decode, data, limits)

    def _read_one(self, url: str, limits: RequestLimits) -> PreparedImage:
        return self._decode(self._read(url, limits), limits)

    def _read(self, url: str, limits: RequestLimits) -> bytes:
        data = self.access.read(url)
        if not url.lower().startswith("data:"):
            limits.take_file(len(data))
        return data

    def _decode(self, data: bytes, limits: RequestLimits) -> PreparedImage:
        return self.processor.prepare(decode_image(data), limits.take_patches)


def image_reader(processor: ImageProcessor, config: ServerConfig) -> ImageReader:
    """With what the flags allow. Raises ValueError for a folder that is none."""
    hosts = frozenset(map(str.lower, config.allowed_media_domains))
    access = MediaAccess(
        real_folders(config.allowed_local_media_path),
        web=WebFetch(hosts) if hosts else None,
        max_bytes=config.max_body_bytes,
    )
    return ImageReader(processor, access)
