"""Writes a file so that readers see its old content or its new content, never a part of it."""

import contextlib
import os
import uuid
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replace a file. Raises OSError, and leaves the file as it was. A device or a pipe gets the
    data and stays: root could replace /dev/null.

    mode   permissions of the file, of which the umask is taken off
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    unfinished = path.with_name(f"unfinished-{uuid.uuid4().hex}.tmp")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):  # after the replacement there is none
            unfinished.unlink()
