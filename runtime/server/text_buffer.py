"""A buffer of streamed text that is split at markers, which may span two pieces of text."""


class TextBuffer:
    """A buffer of text; `rest` is the text not taken yet."""

    def __init__(self) -> None:
        self.rest = ""

    def feed(self, text: str) -> None:
        self.rest += text

    def take(self, length: int) -> str:
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def take_until(self, *markers: str) -> tuple[str, str]:
        """Take the text before the first marker, and the marker; the marker is "" if none was
        found.

        Without a marker, a suffix that may be the start of one stays in the buffer. No marker may
        contain another.
        """
        matches = [(index, marker) for marker in markers if (index := self.rest.find(marker)) >= 0]
        if matches:
            index, marker = min(matches)
            text = self.take(index)
            return text, self.take(len(marker))
        num_held = max(partial_marker_length(self.rest, marker) for marker in markers)
        return self.take(len(self.rest) - num_held), ""


def partial_marker_length(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
