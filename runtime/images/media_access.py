"""Reads what the URL of an image stands for: data, a file in an allowed folder, a web address."""

import base64
import binascii
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.web_fetch import WebFetch

URL_FORMS = "data:image/png;base64,..., file:///... or https://..."
NO_WEB = (
    "http and https URLs are not allowed: send the image as data:image/png;base64,... "
    "(the server's flag --allowed-media-domains allows hosts)"
)
# One sentence for all reasons: a client cannot find out which files exist.
NOT_THERE = "file: no image in an allowed folder has this path"


def is_web_url(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


@dataclass(frozen=True)
class MediaAccess:
    """What the images of messages may be read from.

    folders     of file: URLs, as real paths; data: URLs are always allowed
    any_file    file: URLs and plain paths may name any file (for the user of this process)
    web         fetches http and https URLs; None: they are not allowed
    max_bytes   maximum size of one image file
    """

    folders: tuple[Path, ...] = ()
    any_file: bool = False
    web: WebFetch | None = None
    max_bytes: int = 16 * 2**20

    def read(self, url: str) -> bytes:
        """The image file. Raises ImageError."""
        if is_data_url(url):
            data = _decode_data_url(url)
        elif is_web_url(url):
            if self.web is None:
                raise ImageError(NO_WEB)
            return self.web.get(url, self.max_bytes)
        elif url[:5].lower() == "file:":
            data = self._read_file_url(url)
        elif self.any_file and url:
            data = self._read_any(Path(url).expanduser())
        else:
            raise ImageError(f"the URL of an image begins with {url[:16]!r}, expected {URL_FORMS}")
        if len(data) > self.max_bytes:
            raise ImageError(_too_large(self.max_bytes))
        return data

    def _read_file_url(self, url: str) -> bytes:
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
            raise ImageError("the URL of an image file is invalid, expected file:///path")
        if self.any_file:
            return self._read_any(Path(path))
        if not self.folders:
            raise ImageError(
                "file: URLs are not allowed: start the server with --allowed-local-media-path"
            )
        try:
            real = Path(path).resolve(strict=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise ImageError(NOT_THERE) from error
        folder = next((allowed for allowed in self.folders if real.is_relative_to(allowed)), None)
        if folder is None or ".." in Path(path).parts:
            raise ImageError(NOT_THERE)
        try:
            return _read_below(folder, real.relative_to(folder).parts, self.max_bytes)
        except OSError as error:
            raise ImageError(NOT_THERE) from error

    def _read_any(self, path: Path) -> bytes:
        try:
            size = path.stat().st_size
            if size > self.max_bytes:
                raise ImageError(f"{path}: {_too_large(self.max_bytes)}")
            return path.read_bytes()
        except OSError as error:
            raise ImageError(f"{path}: {error.strerror or error}") from error


def real_folders(
    paths: Iterable[str], option: str = "allowed_local_media_path"
) -> tuple[Path, ...]:
    """The real paths of the folders of an option. Raises ValueError for a path that is not one."""
    folders = tuple(Path(path).expanduser() for path in paths)
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{option} is {str(folder)!r}, expected a directory")
    return tuple(folder.resolve() for folder in folders)


def _read_below(folder: Path, names: tuple[str, ...], max_bytes: int) -> bytes:
    """The regular file at this path without links below the folder. Raises OSError.

    Each part is opened relative to its parent, and no link is followed: a path that is replaced
    after it was checked cannot lead out of the folder.
    """
    if not names:
        raise IsADirectoryError(folder)
    *parents, name = names
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for parent in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            below = os.open(parent, flags, dir_fd=at)
            os.close(at)
            at = below
        # A pipe without a writer would block; O_NONBLOCK does not change the reading of files.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=at), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError("not a regular file")
            return file.read(max_bytes + 1)
    finally:
        os.close(at)


def _decode_data_url(url: str) -> bytes:
    header, comma, data = url[5:].partition(",")
    kind, *options = header.split(";")
    if not comma or "base64" not in map(str.lower, options):
        raise ImageError("the data: URL of an image is not data:image/png;base64,...")
    if kind and not kind.lower().startswith("image/"):
        raise ImageError(f"the data: URL has the type {kind[:40]!r}, expected image/...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: not ASCII
        raise ImageError("the data: URL of an image is not valid base64") from error


def _too_large(max_bytes: int) -> str:
    return f"the image file has more than {max_bytes} bytes"
