"""Log-probabilities of tokens: log-softmax of the model's logits, before temperature, penalties and
filters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability and rank (1: most likely) of a token.

    top   the most likely tokens with their log-probabilities, best first
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
