"""The compile cache on disk.

An entry is a file of plain data, named by the digest of the cache key (atomc.cache.fingerprint):

    atomc-cache 1 <sha256 of the rest>
    {"option rounding": "'fp32'", ...}          the parts of the key, to report what changed
    torch.save of the data, read with weights_only

Entries are written to a temporary file and renamed, so that readers see a whole entry or none. The
least recently used entries are deleted when the folder exceeds its limit. An error in the cache
does not fail a program: it is compiled, and the report says why.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import torch

from atomc.cache.compiled import CompiledData
from atomc.cache.fingerprint import Parts
from atomc.files.atomic_file import write_atomically
from atomc.options import Options
from atomc.report.records import PARTS
from atomc.report.report import VERSION, Report
from atomc.trusted_folder import untrusted

log = logging.getLogger("atomc")
Data = TypeVar("Data")

_MAGIC = b"atomc-cache 1"
_ENTRY = re.compile(r"[0-9a-f]{64}\.atomc")
# One line per graph of recent processes; the file is truncated at this many bytes.
_STARTS, _MAX_STARTS_BYTES = "starts.jsonl", 2**16
# The writer of an unfinished file of this age, in seconds, has died.
_ABANDONED_SECONDS = 3600.0
# At most this many entries, most recently used first, are compared to report what changed.
_MAX_COMPARED = 64


class ProgramData(TypedDict):
    """The content of the entry of a compiled program.

    written  the numbers of the inputs that the graph writes
    report   see `report_json`
    guards   on sizes, see atomc.torch_compat.tracing.guards_of
    missing  the providers of kernels that could not be imported
    model, places, arguments, graph  if its key identifies a model: see atomc.cache.model_cache
    """

    written: list[int]
    report: str
    guards: str | None
    missing: list[str]
    compiled: CompiledData
    model: NotRequired[str]
    places: NotRequired[list[str | None]]
    arguments: NotRequired[list[tuple[str, int | None] | None]]
    graph: NotRequired[str]


class DamagedEntry(Exception):
    """The content of an entry is not what was written."""


@dataclass(frozen=True)
class Usage:
    """The content of a cache folder."""

    folder: Path
    entries: int
    bytes: int


def usage(options: Options) -> Usage:
    """Number and size in bytes of the entries. An absent folder has none."""
    sizes = [size for _, _, size in _entries(options.cache_folder)]
    return Usage(options.cache_folder, len(sizes), sum(sizes))


def clear(options: Options) -> Usage:
    """Delete every entry, unfinished file and start record; returns what was deleted."""
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
class StartRecord:
    """The outcome of the cache for one graph of a process. at: seconds since 1970; said: as
    Report.cache.
    """

    at: float
    process: int
    model: str
    said: str


def record_start(options: Options, report: Report) -> None:
    """Append the outcome for a graph, for `last_start`. Does nothing if the folder is absent or not
    writable.
    """
    path = options.cache_folder / _STARTS
    line = json.dumps(asdict(StartRecord(time.time(), os.getpid(), report.model, report.cache)))
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size > _MAX_STARTS_BYTES:
            path.unlink()
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{line}\n")


def last_start(options: Options) -> list[StartRecord]:
    """The graphs of the last process that used the cache, in order, without lines that cannot be
    read.
    """
    records = []
    with contextlib.suppress(OSError):
        for line in (options.cache_folder / _STARTS).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):
                records.append(StartRecord(**json.loads(line)))
    return [start for start in records if start.process == records[-1].process]


class Entry(Generic[Data]):
    """The cache file of one program. Its part "graph" or "model" identifies the program. Data: of
    its content.
    """

    def __init__(self, parts: Parts, options: Options):
        self.parts, self.options = parts, options
        self.folder = options.cache_folder
        self.key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        self.path = self.folder / f"{self.key}.atomc"

    def read(self) -> Data | None:
        """The stored data; None if there is no entry. Raises DamagedEntry, or OSError if it cannot
        be read or trusted.
        """
        if not self.path.exists():
            return None
        reason = untrusted(self.folder) or untrusted(self.path)
        if reason:
            raise PermissionError(reason)
        head, _, rest = self.path.read_bytes().partition(b"\n")
        if head != _header(rest):
            raise DamagedEntry("its checksum is wrong")
        try:
            data: Data = torch.load(io.BytesIO(rest.partition(b"\n")[2]), weights_only=True)
        except Exception as error:  # data that was not written here can raise anything
            raise DamagedEntry(f"{type(error).__name__}: {error}") from error
        with contextlib.suppress(OSError):
            os.utime(self.path)
        return data

    def write(self, data: Data) -> None:
        """Store the data, and evict the least recently used entries beyond the size limit. Raises
        OSError.
        """
        buffer = io.BytesIO()
        torch.save(data, buffer)
        rest = json.dumps(self.parts).encode() + b"\n" + buffer.getvalue()
        content = _header(rest) + b"\n" + rest
        if len(content) > self.options.cache_size:
            raise OSError(
                f"the entry has {len(content)} bytes, the limit of the cache is "
                f"{self.options.cache_size}"
            )
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = untrusted(self.folder)
        if reason:
            raise PermissionError(reason)
        write_atomically(self.path, content, mode=0o600)
        self._evict()

    def delete(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    def why_missing(self) -> str:
        """The parts that differ from the most similar entry."""
        what = "graph" if "graph" in self.parts else "model"
        nearest: tuple[tuple[bool, int], Parts] | None = None
        newest_first = sorted(_entries(self.folder), key=lambda entry: -entry[1])
        for path, _, _ in newest_first[:_MAX_COMPARED]:
            parts = _read_parts(path)
            similarity = (
                parts.get(what) == self.parts[what],
                sum(self.parts.get(name) == value for name, value in parts.items()),
            )
            if parts and (nearest is None or similarity > nearest[0]):
                nearest = similarity, parts
        if nearest is None:
            return "the cache is empty"
        if not nearest[0][0]:
            return f"no entry for this {what}"
        return "; ".join(differences(nearest[1], self.parts)) or "the entry was deleted"

    def _evict(self) -> None:
        oldest_first = sorted(_entries(self.folder), key=lambda entry: entry[1])
        total = sum(size for _, _, size in oldest_first)
        for path, _, size in oldest_first:
            if total <= self.options.cache_size:
                break
            if path != self.path:
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= size
        for path in self.folder.glob("unfinished-*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()


def differences(old: Parts, new: Parts) -> list[str]:
    """The parts that changed, one phrase each, at most three."""
    changed = [
        name
        for name in [*new, *(name for name in old if name not in new)]
        if old.get(name) != new.get(name)
    ]
    words = [_change(name, old.get(name), new.get(name)) for name in changed[:3]]
    return words + [f"and {len(changed) - 3} more"] * (len(changed) > 3)


def _change(name: str, before: str | None, after: str | None) -> str:
    """A part that changed; long values and digests are left out."""
    if before is None or after is None:
        return f"{name} was {'added' if before is None else 'removed'}"
    if name.startswith("source") or len(before) + len(after) > 400:
        return f"{name} changed"
    return f"{name} changed from {before} to {after}"


def _header(rest: bytes) -> bytes:
    return _MAGIC + b" " + hashlib.sha256(rest).hexdigest().encode()


def _entries(folder: Path) -> list[tuple[Path, float, int]]:
    """(path, time of last use, bytes) of each entry."""
    return list(_stats(folder))


def _stats(folder: Path) -> Iterator[tuple[Path, float, int]]:
    try:
        names = [name for name in os.listdir(folder) if _ENTRY.fullmatch(name)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # another process may delete it meanwhile
            stat = (folder / name).stat()
            yield folder / name, stat.st_mtime, stat.st_size


def _read_parts(path: Path) -> Parts:
    """The parts of an entry; {} if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.readline(256)
            parts = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return parts if isinstance(parts, dict) else {}


# Fields of a report that describe this start, and are not stored.
_OF_THIS_START = (
    "model",
    "treated",
    "why_not",
    "phases",
    "graph_break",
    "continues",
    "call",
    "recompile",
    "cuda_graphs",
    "repeated",
    "cached",
)


def report_json(report: Report) -> str:
    """The fields of a report that describe the compiled graph, as JSON."""
    data = {
        field.name: getattr(report, field.name)
        for field in fields(report)
        if field.name not in _OF_THIS_START
    }
    for name in PARTS:
        data[name] = [asdict(item) for item in data[name]]
    return json.dumps({**data, "matches": dict(report.matches)})


def fill_report(report: Report, text: str) -> None:
    """Fill a report with stored fields."""
    data = json.loads(text)
    stored = Report.of({**data, "version": VERSION, "model": report.model})
    for name in data:
        value = getattr(stored, name)
        if isinstance(value, list):
            getattr(report, name).extend(value)
        elif isinstance(value, dict):
            getattr(report, name).update(value)
        else:
            setattr(report, name, value)


def check_plain(data: Any, where: str = "entry") -> None:
    """Raise TypeError if the data contains an object that weights_only cannot load."""
    if isinstance(data, dict):
        for key, value in data.items():
            check_plain(key, where)
            check_plain(value, f"{where}[{key!r}]")
    elif isinstance(data, list | tuple):
        for i, value in enumerate(data):
            check_plain(value, f"{where}[{i}]")
    elif not isinstance(data, str | int | float | bool | bytes | torch.dtype | torch.Tensor | None):
        raise TypeError(f"{where} is a {type(data).__name__}")
