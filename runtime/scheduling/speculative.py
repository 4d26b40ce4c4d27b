"""Speculative decoding: n-gram drafts, and the verification of all drafts.

A step computes a request's last token and its draft, so that each position has logits, and a token
is sampled at each position (`SampleSpec.draft` has the draft tokens before it). A draft token is
accepted if it equals the token sampled at its position. This is rejection sampling with a
deterministic draft: a token of probability p is accepted with probability p, otherwise the token
comes from the distribution without it. Since each position has its own random number, the output
for the same logits equals that without drafts. Logits can differ by rounding, because a step with
drafts has more rows; not with batch_invariant.
"""

from collections.abc import Sequence
from fractions import Fraction

# Steps after which forced acceptance repeats, at most.
MOST_PERIOD = 10_000
MULTIPLIER = 0x9E3779B97F4A7C15  # odd, near 2**64 / golden ratio: spreads consecutive seeds


class NGramProposer:
    """Proposes the tokens that followed the last occurrence of the sequence's final n-gram.

    Uses the longest n-gram of `shortest` to `longest` tokens that occurred before. Occurrences are
    indexed: a call reads only the tokens added since the previous call.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.lengths = range(longest, shortest - 1, -1)
        # End of the last occurrence of each n-gram that is followed by a token; n-grams that end at
        # `read` or later are not indexed yet.
        self.ends: dict[tuple[int, ...], int] = {}
        self.read = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` draft tokens; [] if the final n-gram has no earlier occurrence."""
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
                return _repeated(tokens, start, count)
        return []


def _repeated(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start`, repeating tokens[start:] after its end."""
    repeated = list(tokens[start : start + count])
    while len(repeated) < count:
        repeated.append(repeated[len(repeated) - (len(tokens) - start)])
    return repeated


class ForcedAcceptance:
    """Accepts drafts such that steps yield `average` tokens, for benchmarks: n steps of a request
    with complete drafts yield n * average tokens, rounded up or down. Depends only on the request's
    seed and the number of its drafts.
    """

    def __init__(self, average: float) -> None:
        exact = Fraction(average).limit_denominator(MOST_PERIOD)
        self.tokens, self.steps = exact.numerator, exact.denominator

    def count(self, seed: int, num_drafts: int) -> int:
        """How many tokens of a draft are accepted, after num_drafts drafts of the request."""
        # Requests begin at different places of the period.
        first = (seed * MULTIPLIER % 2**64 >> 32) % self.steps
        # The tokens of all steps before this one, and up to it.
        before, after = (
            (number * self.tokens + first) // self.steps for number in (num_drafts, num_drafts + 1)
        )
        return after - before - 1


def accepted(draft: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """The valid prefix of the tokens sampled after the last token and each draft token: up to the
    first rejected draft token.
    """
    count = 0
    while count < len(draft) and draft[count] == tokens[count]:
        count += 1
    return tokens[: count + 1]
