"""API keys: where they come from, and whether a request has one."""

import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path


def check_key(key: str, where: str) -> None:
    """Raises ValueError for a key that no header can hold."""
    if not key:
        raise ValueError(f"an {where} is empty")
    if key != key.strip() or not key.isprintable():
        raise ValueError(f"an {where} begins or ends with a space, or has a character that is not printable: no client can "
                         "send it")  # fmt: skip


def read_keys(file: str) -> list[str]:
    """The keys of a file, one a line. Raises OSError, and ValueError for a file without any."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key-file {file} is not UTF-8: {error}") from error
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise ValueError(f"--api-key-file {file} has no key, expected one a line")
    for key in found:
        check_key(key, f"key in --api-key-file {file}")
    return found


class ApiKeys:
    """Tells whether the headers of a request bring one of these keys. Without keys, every request may come in."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Clients differ in how they send what is not ASCII.
        self._encoded_keys = list({form for key in keys for form in _encodings(key)})

    def authorizes(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """headers: as they came, with names in lower case."""
        if not self._encoded_keys:
            return True
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:  # of two, another server on the way may have looked at the other one
            return False
        scheme, _, key = given[0].strip().partition(b" ")
        # Every key is compared, whole: the time says nothing about them.
        found = [hmac.compare_digest(key.strip(), known) for known in self._encoded_keys]
        return scheme.lower() == b"bearer" and any(found)


def _encodings(key: str) -> list[bytes]:
    try:
        return [key.encode(), key.encode("latin-1")]
    except UnicodeEncodeError:
        return [key.encode()]
