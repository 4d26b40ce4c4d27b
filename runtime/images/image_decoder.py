"""Decodes images in a separate process, which an expensive or crashing image cannot harm."""

import json
import signal
import socket
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from atomc.files.json_types import JSONObject
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.processor import PlaceholderTokens, Reserve, image_tokens
from atomc.runtime.processes.fork_server import ForkServer
from atomc.runtime.requests.request import PromptImage

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer

WORKER = "atomc.runtime.images.decode_worker"
# Limits of an image without pixels; decode_worker adds some for each pixel.
CPU_SECONDS = 2.0
MEMORY_BYTES = 2**28
# Wall-clock limit for each answer of a fork: forks have a low priority.
WAIT_SECONDS = 120.0
MAX_LINE = 2**16


class LargeImage(Exception):
    """The image has more pixels than the request for it allows."""


class ImageDecoder:
    """Decodes and prepares the images of one model in a worker process, which ends with this
    object. Thread-safe.

    folder    of the model
    tokens    of the model
    seconds   CPU time limit of an image without pixels
    memory    memory limit of an image without pixels in bytes
    wait      wall-clock limit for each answer of the process in seconds
    """

    def __init__(
        self,
        folder: Path,
        tokens: PlaceholderTokens,
        *,
        seconds: float = CPU_SECONDS,
        memory: int = MEMORY_BYTES,
        wait: float = WAIT_SECONDS,
    ) -> None:
        self.tokens = tokens
        self._seconds, self._memory, self._wait = seconds, memory, wait
        settings = {"folder": str(folder.resolve()), "seconds": seconds, "memory": memory}
        self._server = ForkServer(WORKER, settings)

    def connect(self) -> socket.socket:
        """A connection for one image. Raises ValueError if the model's image processor cannot be
        used, with the reason, and RuntimeError if the process does not answer.
        """
        return self._server.connect()

    def prepare(
        self,
        connection: socket.socket,
        source: str | bytes,
        reserve: Reserve,
        *,
        max_pixels: int,
        max_bytes: int,
    ) -> PromptImage:
        """The prepared image of a data: URL, or of a file. Shutting the connection down in another
        thread ends the call and the work.

        max_bytes   maximum size of the file of a URL

        Raises ImageError for an image that cannot be used, LargeImage, what `reserve` raises, and
        RuntimeError if the processor fails.
        """
        data = source.encode("ascii", "replace") if isinstance(source, str) else source
        request = {
            "is_url": isinstance(source, str),
            "num_bytes": len(data),
            "max_pixels": max_pixels,
            "max_bytes": max_bytes,
        }
        connection.settimeout(self._wait)
        with connection, connection.makefile("rb") as file:
            try:
                connection.sendall(json.dumps(request).encode() + b"\n")
                connection.sendall(data)
                message = self._answer(file)
                reserve(message["length"], message["num_bytes"])
                connection.sendall(b"\n")
                result = self._answer(file)
                pixels = file.read(message["num_bytes"])
            except TimeoutError as error:
                raise ImageError(f"decoding it exceeds the limit of {self._wait:g} s") from error
            except (BrokenPipeError, ConnectionResetError) as error:
                raise RuntimeError("the process that decodes an image ended") from error
        if len(pixels) != message["num_bytes"]:
            raise RuntimeError("the process that decodes an image ended before its last pixel")
        temporal, vertical, horizontal = result["grid"]
        grid = (temporal, vertical, horizontal)
        return PromptImage(0, message["length"], grid, pixels, bytes.fromhex(result["digest"]))

    def _answer(self, file: "IO[bytes]") -> "dict[str, Any]":
        """The next message of the worker that is not an error."""
        line = file.readline(MAX_LINE)
        if not line:
            raise RuntimeError("the process that decodes an image ended without an answer")
        message: dict[str, Any] = json.loads(line)
        match message:
            case {"error": text, "code": code}:
                raise ImageError(text, code)
            case {"large": True}:
                raise LargeImage
            case {"out_of_memory": True} | {"signal": signal.SIGKILL}:
                raise ImageError(
                    f"decoding it exceeds the limit of memory ({self._memory >> 20} MiB, and more "
                    "for more pixels): save it again or resize it"
                )
            case {"signal": signal.SIGPROF}:
                raise ImageError(
                    f"decoding it exceeds the limit of CPU time ({self._seconds:g} s, and more for "
                    "more pixels): save it again or resize it"
                )
            case {"signal": number}:
                raise ImageError(f"its decoder was ended by signal {number}: save it again")
            case {"failure": text}:
                raise RuntimeError(f"the image processor failed: {text}")
        return message


def start_image_decoder(
    folder: Path, config: JSONObject, tokenizer: "Tokenizer | None"
) -> ImageDecoder | str:
    """The decoder of a model's folder, ready for images, or why the model reads none.

    config   of config.json
    """
    tokens = image_tokens(folder, config, tokenizer)
    if isinstance(tokens, str):
        return tokens
    decoder = ImageDecoder(folder, tokens)
    try:
        decoder.connect().close()
    except ValueError as error:
        return str(error)
    return decoder
