"""A buffer of streamed text that is split at markers, which may span two pieces of text.

Parsers take the text as it arrives, also where they cannot say yet what it is. What stays in the
buffer is at most the start of a marker, so that the work is linear in the text.
"""

import re
from collections.abc import Callable
from functools import cache


class TextBuffer:
    """A buffer of text; what was taken is not in it any more."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0

    def __len__(self) -> int:
        return len(self._text) - self._start

    def feed(self, text: str) -> None:
        held = self._text[self._start :] if self._start else self._text
        self._text, self._start = held + text, 0

    def startswith(self, *prefixes: str) -> bool:
        return self._text.startswith(prefixes, self._start)

    def is_prefix_of(self, *texts: str) -> bool:
        """Whether more text could make it one of these, which it is not yet."""
        longer = [text for text in texts if len(text) > len(self)]
        held = self._text[self._start :] if longer else ""
        return any(text.startswith(held) for text in longer)

    def take(self, length: int) -> str:
        start, self._start = self._start, min(self._start + length, len(self._text))
        return self._text[start : self._start]

    def take_all(self) -> str:
        return self.take(len(self))

    def take_read(self, read: Callable[[str, int], int]) -> str:
        """Take as many characters as `read(text, position)` returns."""
        return self.take(read(self._text, self._start))

    def take_characters(self, pattern: str) -> str:
        """Take the characters at the start that a regular expression matches, such as r"\\s*"."""
        match = re.compile(pattern).match(self._text, self._start)
        return "" if match is None else self.take(match.end() - self._start)

    def take_until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the first marker, and the marker; the marker is "" if there is none.

        Without one, a suffix that may be its start stays. No marker may contain another.
        """
        match = _any_of(*markers).search(self._text, self._start)
        if match is not None:
            return self.take(match.start() - self._start), self.take(len(match[0]))
        num_held = max(self._partial_length(marker) for marker in markers)
        return self.take(len(self) - num_held), ""

    def _partial_length(self, marker: str) -> int:
        """Length of the longest suffix that is a proper prefix of the marker."""
        longest = min(len(self), len(marker) - 1)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._text.endswith(marker[:n])), 0)


@cache
def _any_of(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
