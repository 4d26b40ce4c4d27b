"""How likely tokens were: log-softmax of the model's logits, before temperature, penalties and
filters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability and rank (1: the most likely), and the most likely tokens with
    theirs, best first.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
