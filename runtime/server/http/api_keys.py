"""Reads API keys and checks requests for them."""

import hmac
from collections.abc import Sequence
from pathlib import Path

from atomc.files.file_of_flag import file_of_flag

AUTHORIZATION = b"authorization"
# The second one is that of Anthropic's API. Clients that have two keys send both.
KEY_HEADERS = (AUTHORIZATION, b"x-api-key")


def check_key(key: str, where: str) -> None:
    """Raises ValueError for a key that cannot be sent in a header."""
    if not key:
        raise ValueError(f"an {where} is empty")
    if key != key.strip() or not key.isprintable():
        raise ValueError(
            f"an {where} begins or ends with white space or has a character that is not printable: "
            "clients cannot send it in a header"
        )


def read_keys(file: str | None, flag: str) -> list[str]:
    """The keys in the file of this flag, one per line; [] without a file. Raises OSError, or
    ValueError for none.
    """
    if file is None:
        return []
    try:
        with file_of_flag(flag, file):
            text = Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {file} is not UTF-8: {error}") from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ValueError(f"{flag} {file} has no key, expected one per line")
    for key in keys:
        check_key(key, f"key in {flag} {file}")
    return keys


class ApiKeys:
    """Checks request headers for one of these keys, or of the admin keys. Without `keys`, every
    request is authorized; without admin keys, every authorized one is an admin's.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._open, self._has_admins = not keys, bool(admin_keys)
        self._first_admin = max(len(keys), 1)  # 0 is the caller without a key
        numbered = (*enumerate(keys), *enumerate(admin_keys, self._first_admin))
        # Clients encode non-ASCII keys differently.
        self._numbers = {form: n for n, key in numbered for form in _encodings(key)}

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
        """The number of the key in a request, of two that of `Authorization`. Without a valid one
        None, or 0 if none is needed.

        headers   ASGI headers, with names in lower case
        """
        number = self._key_number(headers)
        return 0 if number is None and self._open else number

    def is_admin(self, caller: int | None) -> bool:
        return not self._has_admins or (caller is not None and caller >= self._first_admin)

    def _key_number(self, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
        sent = [(name, value.strip()) for name, value in headers if name in KEY_HEADERS]
        # Of two equal headers, a proxy may have checked the other one.
        if len({name for name, _ in sent}) != len(sent):
            return None
        numbers = [self._number(name, value) for name, value in sorted(sent)]
        if not numbers or any(number is None for number in numbers):
            return None
        return numbers[0]

    def _number(self, name: bytes, value: bytes) -> int | None:
        scheme, _, key = value.partition(b" ") if name == AUTHORIZATION else (b"bearer", b"", value)
        # Compare with every key, in constant time.
        numbers = [n for form, n in self._numbers.items() if hmac.compare_digest(key.strip(), form)]
        return numbers[0] if numbers and scheme.lower() == b"bearer" else None


def _encodings(key: str) -> list[bytes]:
    try:
        return [key.encode(), key.encode("latin-1")]
    except UnicodeEncodeError:
        return [key.encode()]
