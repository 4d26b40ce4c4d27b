"""A process that decodes images and prepares them for a model, each in its own fork, with limits on
CPU time and memory.

It does without torch, which the PIL variants of transformers' image processors do not need: it
starts in a quarter of the time and has a sixth of the memory.

A request is a line of JSON and the file; an answer lines of JSON (see ImageDecoder) and patches.
"""

import importlib.util
import json
import logging
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from atomc.errors import first_line
from atomc.runtime.images.decode import decode_pixels, open_image
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.media_access import MediaAccess
from atomc.runtime.images.processor import (
    CHANNELS,
    PIXEL_BYTES,
    ImageProcessor,
    load_image_processor,
)
from atomc.runtime.processes.fork_server import memory_use, serve_forks

HIDDEN = ("torch", "torchvision")
# More memory and CPU time for the pixels of an image, before and after it is resized. Measured for
# 8192 x 4096 in six formats: at most 47 bytes, and 0.1 s of a Xeon for 2**20 pixels.
BYTES_PER_PIXEL = 64
PIXELS_PER_SECOND = 2**22
# A file takes as much as pixels of this number of its bytes: eight copies, as base64 and decoded.
FILE_BYTES_PER_PIXEL = 8
# The shortest: zero would disarm the timer.
TIMER_SECONDS = 1e-3


def main() -> None:
    """As ForkServer expects; settings: those of ImageDecoder."""
    settings = json.load(sys.stdin)
    _hide_torch()
    warnings.simplefilter("ignore")
    logging.disable()
    processor = load_image_processor(Path(settings["folder"]))
    if isinstance(processor, str):
        serve_forks(lambda connection: None, processor)
    else:
        from PIL import Image

        Image.init()  # imports the decoders once, not in each fork
        limits = partial(_Limits, settings["seconds"], settings["memory"])
        serve_forks(partial(_respond, processor, limits))


def _hide_torch() -> None:
    """Let transformers find no torch."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in HIDDEN else find_spec(name, package)

    importlib.util.find_spec = find


def _respond(
    processor: ImageProcessor, limits: "Callable[[], _Limits]", connection: socket.socket
) -> None:
    try:
        _prepare(processor, limits(), connection)
    except ImageError as error:
        _send(connection, error=str(error), code=error.code)
    except MemoryError:
        _send(connection, out_of_memory=True)
    except Exception as error:  # of any class of transformers
        _send(connection, failure=f"{type(error).__name__}: {first_line(error)}")


def _prepare(processor: ImageProcessor, limits: "_Limits", connection: socket.socket) -> None:
    file = connection.makefile("rb")
    request = json.loads(file.readline())
    limits.extend(request["num_bytes"] // FILE_BYTES_PER_PIXEL)
    data = file.read(request["num_bytes"])
    if request["is_url"]:
        data = MediaAccess(max_bytes=request["max_bytes"]).read(data.decode())
    image = open_image(data)
    num_pixels = image.width * image.height
    if num_pixels > request["max_pixels"]:
        _send(connection, large=True)
        return
    limits.extend(num_pixels)

    def reserve(length: int, num_bytes: int) -> None:
        limits.extend(num_bytes // (CHANNELS * PIXEL_BYTES))
        _send(connection, length=length, num_bytes=num_bytes)
        if not file.readline():  # refused
            sys.exit()

    prepared = processor.prepare(decode_pixels(image), reserve)
    limits.end()
    _send(connection, grid=prepared.grid, digest=prepared.digest.hex())
    connection.sendall(prepared.pixels)


class _Limits:
    """Limits of CPU time and memory of this process, which grow with the pixels of its image."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds, self._memory = seconds, memory_use().size + memory

    def extend(self, num_pixels: int) -> None:
        self._seconds += num_pixels / PIXELS_PER_SECOND
        self._memory += num_pixels * BYTES_PER_PIXEL
        left = self._seconds - time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(left, TIMER_SECONDS))
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = self._memory if hard == resource.RLIM_INFINITY else min(self._memory, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    def end(self) -> None:
        """A signal could otherwise end this process within the patches."""
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
