"""TextBuffer that comes in pieces, cut at markers that may lie across their borders."""


class TextBuffer:
    """What has come and is not yet taken."""

    def __init__(self) -> None:
        self.rest = ""

    def feed(self, text: str) -> None:
        self.rest += text

    def take(self, length: int) -> str:
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken

    def take_until(self, *markers: str) -> tuple[str, str]:
        """The text before the first marker, and that marker, both taken; "" if none is there yet.

        Without a marker, an end that may be the beginning of one stays. No marker may contain another.
        """
        found = [(at, marker) for marker in markers if (at := self.rest.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            text = self.take(at)
            return text, self.take(len(marker))
        held = max(partial_marker_length(self.rest, marker) for marker in markers)
        return self.take(len(self.rest) - held), ""


def partial_marker_length(text: str, marker: str) -> int:
    """Characters at the end of the text that are the beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
