"""Ranges of numbers of tokens, in which kernels are used. Without torch, for the server's front
process.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tokens:
    """A range of numbers of tokens, both ends included; last None: no upper bound.

    Raises ValueError for an empty range.
    """

    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        if self.first < 1 or (self.last is not None and self.last < self.first):
            raise ValueError(
                f"no numbers of tokens from {self.first} to {self.last}: expected 1 <= first "
                "<= last"
            )

    def __contains__(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number <= self.last)

    def __str__(self) -> str:
        """ "1", "2 to 8", "9 and more"."""
        if self.first == self.last:
            return str(self.first)
        return f"{self.first} and more" if self.last is None else f"{self.first} to {self.last}"

    @classmethod
    def of(cls, spelled: str) -> "Tokens":
        """Parses the result of `str`; "any" is the range of all numbers."""
        first, _, rest = spelled.partition(" ")
        if first == "any":
            return cls()
        if rest == "and more":
            return cls(int(first))
        return cls(int(first), int(rest.removeprefix("to ") or first))

    def within(self, others: "Tokens") -> bool:
        """Whether this range is part of the other."""
        return self.first in others and (
            others.last is None if self.last is None else self.last in others
        )


ALL_TOKENS = Tokens()
