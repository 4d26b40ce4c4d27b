"""Limits what a JSON text makes a parser do, without parsing it.

A parser holds the event loop, in a thread too, because it holds the interpreter lock. Within the
limits it takes less than 10 ms.
"""

from itertools import accumulate

# Lists, objects and their keys.
NODES = 2**16
# Values of lists and objects, at least max_len + NODES: token ids are parsed fastest.
VALUES = 2**18
DEPTH = 128
# Digits of a number: parsing it takes quadratic time.
DIGITS = 400
# Bytes of characters outside of ASCII, at least 8 * max_len. An escape takes the time of 6 of them,
# and 20 digits of an integer that needs more than 64 bits that of 80.
SLOW_BYTES = 2**23
ESCAPE_BYTES = 6
LONG_DIGITS, LONG_DIGITS_BYTES = 20, 80
BLOCK_BYTES = 2**16

ASCII = bytes(range(128))
NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
AS_DIGITS = bytes(ord("0" if chr(byte) in "0123456789" else " ") for byte in range(256))
DEPTH_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class JSONScan:
    """Counts what a parser would make of a text in UTF-8. `feed` and `end` raise ValueError
    above a limit. The counts of a text that is not JSON may be wrong; the parser refuses it.

    max_len   the model's maximum sequence length in tokens
    """

    def __init__(self, max_len: int) -> None:
        self._max_values = max(VALUES, max_len + NODES)
        self._max_slow_bytes = max(SLOW_BYTES, 8 * max_len)
        self._num_nodes = self._num_values = self._slow_bytes = self._depth = 0
        self._is_inside = False  # of a string
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Scan the next part of the text."""
        data = self._rest + data if self._rest else data
        start = 0
        while len(data) - start > BLOCK_BYTES:
            block = data[start : start + BLOCK_BYTES]
            start += len(block)
            if (len(block) - len(block.rstrip(b"\\"))) % 2:  # the next block has its other half
                block = block[:-1]
                start -= 1
            self._scan(block)
        self._rest = data[start:]

    def end(self) -> None:
        """Scan what is left."""
        self._scan(self._rest)
        self._rest = b""

    def _scan(self, block: bytes) -> None:
        if not block.isascii():
            self._slow_bytes += len(block.translate(None, ASCII))
        if b"\\" in block:
            self._slow_bytes += ESCAPE_BYTES * block.count(b"\\")
            block = block.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = block.split(b'"')
        outside = b"".join(parts[self._is_inside :: 2])
        self._is_inside ^= len(parts) % 2 == 0
        num_opening = outside.count(b"[") + outside.count(b"{")
        self._num_nodes += num_opening + outside.count(b":")
        self._num_values += num_opening + outside.count(b",")
        if len(outside) >= LONG_DIGITS:
            digits = outside.translate(AS_DIGITS)
            self._slow_bytes += LONG_DIGITS_BYTES * digits.count(b"0" * LONG_DIGITS)
            if b"0" * DIGITS in digits:
                raise ValueError(f"it has a number of {DIGITS} digits or more")
        self._check(outside)

    def _check(self, outside: bytes) -> None:
        """Raises ValueError above a limit. outside: the bytes of the block outside of strings."""
        if self._num_nodes > NODES:
            raise ValueError(
                f"it has more than {NODES} lists, objects and fields: split the request"
            )
        if self._num_values > self._max_values:
            raise ValueError(
                f"it has more than {self._max_values} JSON values: split the request, or "
                "send text, not token ids"
            )
        if self._slow_bytes > self._max_slow_bytes:
            raise ValueError(
                f"it has more than {self._max_slow_bytes} bytes of characters outside of "
                f"ASCII, where an escape counts {ESCAPE_BYTES}, and {LONG_DIGITS} digits in a row "
                f"{LONG_DIGITS_BYTES}: split the request"
            )
        brackets = outside.translate(None, NOT_BRACKETS)
        depths = list(accumulate(map(DEPTH_STEPS.__getitem__, brackets), initial=self._depth))
        self._depth = depths[-1]
        if max(depths) > DEPTH:
            raise ValueError(f"it has more than {DEPTH} levels of nested lists and objects")
        if min(depths) < 0:
            raise ValueError("it closes a list or an object that is not open")


def scan_json(text: bytes, max_len: int) -> None:
    """Raises ValueError if parsing the text would take long."""
    scan = JSONScan(max_len)
    scan.feed(text)
    scan.end()
