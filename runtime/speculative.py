"""Guessing the next tokens, and which of the guesses were right.

A step computes a request's last token and behind it the guesses, its draft, so that each position
gets logits, and the sampler draws a token at each position (`SampleSpec.draft` says which guesses
come before it). A guess is right if it is the token that was drawn there. This is rejection
sampling for guesses that are certain of themselves: one of probability p is accepted with
probability p, and where it is rejected, the token comes from the distribution without it. Since
each position has its own number, the tokens are also the very same as without drafts.
"""

from collections.abc import Sequence


class NGram:
    """Guesses that what followed the same tokens earlier follows again.

    The longest run of `shortest` to `longest` tokens that ends the sequence and occurs before
    counts, and of its occurrences the last one. A run's occurrences are kept, so that only tokens
    since the last call are read.

    Raises ValueError unless 1 <= shortest <= longest.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"n-grams of {shortest} to {longest} tokens, expected at least 1, and no more "
                "at most"
            )
        self.lengths = range(longest, shortest - 1, -1)
        # Where each run ends, the last time that something followed it; runs that end at `read` or
        # later are not in yet.
        self.ends: dict[tuple[int, ...], int] = {}
        self.read = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens; [] if the end of the sequence is new."""
        if len(tokens) < self.read:
            self.ends.clear()
            self.read = 0
        for end in range(self.read, len(tokens)):
            for length in self.lengths:
                if length <= end:
                    self.ends[tuple(tokens[end - length : end])] = end
        self.read = len(tokens)
        for length in self.lengths:
            start = self.ends.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if start is not None:
                return _continued(tokens, start, count)
        return []


def _continued(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; after the last one comes what was just given: a repetition
    goes on.
    """
    found = list(tokens[start : start + count])
    while len(found) < count:
        found.append(found[len(found) - (len(tokens) - start)])
    return found


def accepted(draft: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """The new tokens, of those drawn after the last token and after each guess: all up to the first
    wrong guess.
    """
    right = 0
    while right < len(draft) and draft[right] == tokens[right]:
        right += 1
    return tokens[: right + 1]
