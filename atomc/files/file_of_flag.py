"""Errors of a file that a flag names."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def file_of_flag(flag: str, file: str | Path) -> Iterator[None]:
    """Names the flag in an OSError of its file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{flag} {file}: {error.strerror or error}") from error


def check_folder_of(flag: str, file: str | Path | None) -> None:
    """Raises OSError if the folder of a file to write is none. None: the flag is not given."""
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise FileNotFoundError(f"{flag} {file}: {Path(file).parent} is not a directory")
