"""Resolves the files named in model.safetensors.index.json, which must be in the model's folder."""

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

INDEX = "model.safetensors.index.json"
MAX_LENGTH = 255  # of a file name on most systems


def shard_path(folder: Path, name: str) -> Path:
    """The file of this name in the folder. Raises ValueError for a path or link outside of the
    folder.
    """
    written = PurePosixPath(name)
    if (
        not name.isprintable()
        or PureWindowsPath(name).drive
        or written.is_absolute()
        or ".." in written.parts
        or not written.parts
        or len(name) > MAX_LENGTH
    ):
        raise ValueError(
            f"{INDEX} names {_short(name)}, expected a file in the model's folder such as "
            "model-00001-of-00002.safetensors"
        )
    file = folder / written
    real = Path(os.path.realpath(file))
    if not any(real.is_relative_to(os.path.realpath(root)) for root in _roots(folder)):
        raise ValueError(
            f"{INDEX} names {_short(name)}, a link to {_short(str(real))}, which is not in the "
            "model's "
            "folder: move the file there"
        )
    return file


def _roots(folder: Path) -> list[Path]:
    """The allowed locations: the folder, or the blob store to which snapshots of the hub's cache
    link.
    """
    absolute = Path(os.path.realpath(folder))
    blobs = [parent.parent / "blobs" for parent in absolute.parents if parent.name == "snapshots"]
    return [absolute, *blobs[:1]]


def _short(name: str) -> str:
    return repr(name) if len(name) <= 100 else f"{name[:100]!r}... ({len(name)} characters)"
