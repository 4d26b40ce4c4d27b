"""Reads API keys and checks requests for them."""

import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from atomc.file_of_flag import file_of_flag

AUTHORIZATION = b"authorization"
# The second one is that of Anthropic's API. Clients that have two keys send both.
KEY_HEADERS = (AUTHORIZATION, b"x-api-key")


def check_key(key: str, where: str) -> None:
    """Raises ValueError for a key that cannot be sent in a header."""
    if not key:
        raise ValueError(f"an {where} is empty")
    if key != key.strip() or not key.isprintable():
        raise ValueError(
            f"an {where} begins or ends with white space or has a character that is not "
            "printable: clients "
            "cannot send it in a header"
        )


def read_keys(file: str) -> list[str]:
    """The keys in a file, one per line. Raises OSError, or ValueError if the file has none."""
    try:
        with file_of_flag("--api-key-file", file):
            text = Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--api-key-file {file} is not UTF-8: {error}") from error
    found = [line.strip() for line in text.splitlines() if line.strip()]
    if not found:
        raise ValueError(f"--api-key-file {file} has no key, expected one per line")
    for key in found:
        check_key(key, f"key in --api-key-file {file}")
    return found


class ApiKeys:
    """Checks request headers for one of these keys. Without keys, every request is authorized."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Clients encode non-ASCII keys differently.
        self._numbers = {form: n for n, key in enumerate(keys) for form in _encodings(key)}

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
        """The number of the key in a request, of two that of `Authorization`; None if it has no
        valid one, 0 if there are no keys.

        headers   ASGI headers, with names in lower case
        """
        if not self._numbers:
            return 0
        given = [(name, value.strip()) for name, value in headers if name in KEY_HEADERS]
        # Of two equal headers, a proxy may have checked the other one.
        if len({name for name, _ in given}) != len(given):
            return None
        found = [self._number(name, value) for name, value in sorted(given)]
        if not found or any(number is None for number in found):
            return None
        return found[0]

    def _number(self, name: bytes, value: bytes) -> int | None:
        scheme, _, key = value.partition(b" ") if name == AUTHORIZATION else (b"bearer", b"", value)
        # Compare with every key, in constant time.
        found = [n for form, n in self._numbers.items() if hmac.compare_digest(key.strip(), form)]
        return found[0] if found and scheme.lower() == b"bearer" else None


def _encodings(key: str) -> list[bytes]:
    try:
        return [key.encode(), key.encode("latin-1")]
    except UnicodeEncodeError:
        return [key.encode()]
