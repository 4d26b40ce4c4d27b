"""Folders of caches, which hold code: only their user may write them, and root."""

import contextlib
import logging
import os
from pathlib import Path

from atomc.options import Options

log = logging.getLogger("atomc")


def untrusted(path: Path) -> str | None:
    """Why a file or folder must not be loaded from, or None, also for one that is not there."""
    if not hasattr(os, "getuid") or not os.path.lexists(path):
        return None
    if os.lstat(path).st_uid not in (0, os.getuid()):
        return f"{path} belongs to another user"
    if not path.exists():  # a link of ours to nothing
        return None
    stat = path.stat()
    if stat.st_uid not in (0, os.getuid()):
        return f"{path} is a link to what belongs to another user"
    others = 0o002 if _is_private_group(stat.st_gid) else 0o022
    return f"{path} may be written by other users" if stat.st_mode & others else None


def _is_private_group(number: int) -> bool:
    """Whether this is the group of this user alone, as Linux distributions make one for each user,
    with a umask that lets it write.
    """
    import grp
    import pwd

    with contextlib.suppress(KeyError):  # users and groups without a name
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
        is_own = user.pw_uid != 0 and user.pw_gid == number and user.pw_name == group.gr_name
        return is_own and set(group.gr_mem) <= {user.pw_name}
    return False


def trusted_folder(path: Path, name: str) -> Path:
    """This folder, or if it is untrusted one with this name in ours, which is logged. Raises
    PermissionError if that is untrusted, too.
    """
    with contextlib.suppress(OSError):  # a later write says what is wrong
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = untrusted(path)
    if reason is None:
        return path
    ours = Options.of().cache_folder / name
    for folder in (ours.parent, ours):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if also := untrusted(ours.parent) or untrusted(ours):
        raise PermissionError(
            f"{reason}, and {also}: set ATOMC_CACHE_DIR to a folder that only you may write"
        )
    log.warning(
        "code is not loaded from a cache that others may have written: %s; the cache is %s",
        reason,
        ours,
    )
    return ours
