"""Compiled graphs on disk, so that a second start compiles nothing.

An entry is a file of plain data, named by the digest of all that the graph depends on (atomc.cache.fingerprint):

    atomc-cache 1 <sha256 of what follows>
    {"option rounding": "'fp32'", ...}          the parts of that digest, to say what changed
    torch.save of the data, read with weights_only

Entries are written to a file beside and renamed, so that readers see all of one or nothing; the least recently used go
when the folder grows beyond its cap. Nothing that goes wrong here breaks a program: it compiles, and the report says why.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from atomc.cache.fingerprint import KERNEL_SOURCE, OUR_KERNELS, Parts
from atomc.options import Options
from atomc.report import PARTS, Report

log = logging.getLogger("atomc")

Plain = dict[str, Any]
_MAGIC = b"atomc-cache 1"
_ENTRY = re.compile(r"[0-9a-f]{64}\.atomc")
_UNFINISHED = re.compile(r"unfinished-.*\.tmp")
# What became of the last starts, a line each, and the bytes at which it begins anew.
_STARTS, _MOST_STARTS = "starts.jsonl", 2**16
# An unfinished file this old, in seconds, has nobody who writes it.
_ABANDONED = 3600.0
# So many entries, the last used first, are compared to say what changed.
_COMPARED = 64


class Damaged(Exception):
    """An entry is not what was written."""


@dataclass(frozen=True)
class Usage:
    """What lies in a cache folder."""

    folder: Path
    entries: int
    bytes: int


def usage(options: Options) -> Usage:
    """How many entries there are, and their size. An absent folder has none."""
    sizes = [size for _, _, size in _entries(options.cache_folder)]
    return Usage(options.cache_folder, len(sizes), sum(sizes))


def clear(options: Options) -> Usage:
    """Delete every entry, and nothing else; says what is gone."""
    folder, count, freed = options.cache_folder, 0, 0
    for path, _, size in _entries(folder):
        with contextlib.suppress(OSError):
            path.unlink()
            count, freed = count + 1, freed + size
    for path in (*folder.glob("unfinished-*.tmp"), folder / _STARTS):
        with contextlib.suppress(OSError):
            path.unlink()
    return Usage(folder, count, freed)


@dataclass(frozen=True)
class Started:
    """What the cache did for one graph of a process. at: seconds since 1970; said: as Report.cache."""

    at: float
    process: int
    model: str
    said: str


def remember(options: Options, report: Report) -> None:
    """Note what became of a graph, for `last_start`. A folder that is not there or cannot be written is left alone."""
    path = options.cache_folder / _STARTS
    line = json.dumps(asdict(Started(time.time(), os.getpid(), report.model, report.cache)))
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size > _MOST_STARTS:
            path.unlink()
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{line}\n")


def last_start(options: Options) -> list[Started]:
    """The graphs of the last process that asked the cache, in order. What cannot be read is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (options.cache_folder / _STARTS).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                found.append(Started(**json.loads(line)))
    return [start for start in found if start.process == found[-1].process]


class Entry:
    """The place of one program in the cache. Its part "graph", or "model", says what is to be compiled."""

    def __init__(self, parts: Parts, options: Options):
        self.parts, self.options = parts, options
        self.folder = options.cache_folder
        self.key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        self.path = self.folder / f"{self.key}.atomc"

    def read(self) -> Plain | None:
        """What was stored; None if there is nothing. Raises Damaged for an entry that is not whole, OSError."""
        if not self.path.exists():
            return None
        reason = untrusted(self.folder) or untrusted(self.path)
        if reason:
            raise PermissionError(reason)
        head, _, rest = self.path.read_bytes().partition(b"\n")
        if head != _head(rest):
            raise Damaged("its checksum is wrong")
        try:
            found: Plain = torch.load(io.BytesIO(rest.partition(b"\n")[2]), weights_only=True)
        except Exception as error:  # whatever it is, it was not written like this
            raise Damaged(f"{type(error).__name__}: {error}") from error
        with contextlib.suppress(OSError):
            os.utime(self.path)
        return found

    def write(self, data: Plain) -> None:
        """Store the data; evicts what was not used for longest if the folder is beyond its cap. Raises OSError."""
        buffer = io.BytesIO()
        torch.save(data, buffer)
        rest = json.dumps(self.parts).encode() + b"\n" + buffer.getvalue()
        whole = _head(rest) + b"\n" + rest
        if len(whole) > self.options.cache_size:
            raise OSError(f"the entry has {len(whole)} bytes, the cache may have {self.options.cache_size}")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = untrusted(self.folder)
        if reason:
            raise PermissionError(reason)
        handle, name = tempfile.mkstemp(prefix="unfinished-", suffix=".tmp", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(whole)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self._evict()

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def why_missing(self) -> str:
        """What differs from the entry most like this one."""
        what = "graph" if "graph" in self.parts else "model"
        nearest: tuple[tuple[bool, int], Parts] | None = None
        newest_first = sorted(_entries(self.folder), key=lambda entry: -entry[1])
        for path, _, _ in newest_first[:_COMPARED]:
            parts = _parts_in(path)
            likeness = (parts.get(what) == self.parts[what],
                        sum(self.parts.get(name) == value for name, value in parts.items()))  # fmt: skip
            if parts and (nearest is None or likeness > nearest[0]):
                nearest = likeness, parts
        if nearest is None:
            return "the cache is empty"
        if not nearest[0][0]:
            return f"no entry for this {what}"
        return "; ".join(differences(nearest[1], self.parts)) or "the entry is gone"

    def _evict(self) -> None:
        found = sorted(_entries(self.folder), key=lambda entry: entry[1])
        total = sum(size for _, _, size in found)
        for path, _, size in found:
            if total <= self.options.cache_size:
                break
            if path != self.path:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size
        for path in self.folder.glob("unfinished-*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()


def differences(old: Parts, new: Parts) -> list[str]:
    """What changed, in words, at most three of them."""
    changed = [name for name in [*new, *(name for name in old if name not in new)] if old.get(name) != new.get(name)]
    # The file of a kernel is a file of ours, too: one line says it.
    if any(name.startswith(KERNEL_SOURCE) for name in changed):
        changed = [name for name in changed if not name.startswith(OUR_KERNELS)]
    words = []
    for name in changed:
        before, after = old.get(name), new.get(name)
        if before is None or after is None:
            words.append(f"{name} is {'new' if before is None else 'gone'}")
        elif name.startswith("source") or len(before) + len(after) > 400:
            words.append(f"{name} changed")
        else:
            words.append(f"{name} changed from {before} to {after}")
    return words[:3] + [f"and {len(words) - 3} more"] * (len(words) > 3)


def untrusted(path: Path) -> str | None:
    """Why nothing is loaded from here, or None: an entry is code, so it must be the user's own."""
    if not hasattr(os, "getuid") or not path.exists():
        return None
    found = path.stat()
    if found.st_uid != os.getuid():
        return f"{path} belongs to another user"
    return f"{path} may be written by other users" if found.st_mode & 0o022 else None


def _head(rest: bytes) -> bytes:
    return _MAGIC + b" " + hashlib.sha256(rest).hexdigest().encode()


def _entries(folder: Path) -> list[tuple[Path, float, int]]:
    """(path, last use, bytes) of each entry."""
    return list(_stats(folder))


def _stats(folder: Path) -> Iterator[tuple[Path, float, int]]:
    try:
        names = [name for name in os.listdir(folder) if _ENTRY.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # another process may have deleted it by now
            stat = (folder / name).stat()
            yield folder / name, stat.st_mtime, stat.st_size


def _parts_in(path: Path) -> Parts:
    """The parts of an entry; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.readline(256)
            parts = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return parts if isinstance(parts, dict) else {}


# What is known of a graph when its entry is read, and of this start only.
_OF_THIS_START = ("model", "treated", "why_not", "phases", "graph_break", "recompile", "cuda_graphs", "cached")


def plain_report(report: Report) -> Plain:
    """What a report says of the compiled graph, as plain data."""
    data = {field.name: getattr(report, field.name) for field in fields(report) if field.name not in _OF_THIS_START}
    for name in PARTS:
        data[name] = [asdict(item) for item in data[name]]
    return {**data, "matches": dict(report.matches)}


def fill_report(report: Report, data: Plain) -> None:
    """Write into a report what another start found out."""
    for name, value in data.items():
        if name == "matches":
            report.matches.update(value)
        elif isinstance(value, list):
            kind = PARTS.get(name)
            getattr(report, name).extend(kind(**item) for item in value) if kind else getattr(report, name).extend(value)
        elif isinstance(value, dict):
            getattr(report, name).update(value)
        else:
            setattr(report, name, value)


def check_plain(data: Any, where: str = "entry") -> None:
    """Raise TypeError if something is in the data that weights_only would not load."""
    if isinstance(data, dict):
        for key, value in data.items():
            check_plain(key, where)
            check_plain(value, f"{where}[{key!r}]")
    elif isinstance(data, list | tuple):
        for i, value in enumerate(data):
            check_plain(value, f"{where}[{i}]")
    elif not isinstance(data, str | int | float | bool | bytes | torch.dtype | torch.Tensor | None):
        raise TypeError(f"{where} is a {type(data).__name__}")
