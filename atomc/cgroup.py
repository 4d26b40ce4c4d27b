"""Limits of the control groups (versions 1 and 2) of this process on Linux; None without a limit.

The limits of all groups up to the root apply. In a container the path in /proc/self/cgroup may be
that of the host, which does not exist there; then its existing parents below the mount are the
groups of the container.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# Limit, usage, and the file cache in memory.stat: of version 2 and of version 1.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cpu_quota(root: Path) -> float | None:
    """The CPU time quota of the process in CPUs, such as 1.5."""
    quotas = []
    for folder in _folders("cpu", root):
        quota, period = (*_words(folder / "cpu.max"), "", "")[:2]
        if not quota:
            quota, period = (
                (*_words(folder / name), "")[0]
                for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            )
        if quota.isdecimal() and period.isdecimal() and int(period):  # not "max", not -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes the process can still allocate; the file cache is free, as in MemAvailable."""
    sizes = []
    for folder in _folders("memory", root):
        for limit_name, used_name, files_name in MEMORY_FILES:
            limit, used = ((*_words(folder / name), "")[0] for name in (limit_name, used_name))
            if limit.isdecimal() and used.isdecimal():
                stat = _words(folder / "memory.stat")
                files = dict(zip(stat[::2], stat[1::2], strict=False)).get(files_name, "0")
                sizes.append(max(int(limit) - int(used) + int(files), 0))
    return min(sizes, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the process's groups with this controller, from its own up to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controller not in controllers.split(","):
            continue
        # If both versions are mounted, version 2 has no limits.
        mount = root / "sys/fs/cgroup" / ("" if number == "0" else controller)
        below = mount / path.strip("/")
        yield from (
            folder
            for folder in (below, *below.parents)
            if folder == mount or mount in folder.parents
        )


def _words(file: Path) -> tuple[str, ...]:
    try:
        return tuple(file.read_text().split())
    except OSError:
        return ()
