"""Which of the counts of tokens on the device are those of a request. Without torch."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class RequestCounts:
    """Those of one request, since it got its slot.

    tokens   from the first one of the prompt; complete before the first draw, which counts them,
             and [] after it
    row      of TokenCounts, from the first draw on
    length   so many tokens are counted, or up to `pending` more, which only the device knows; 0
             before the first draw
    """

    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    length: int = 0
    pending: int = 0

    @property
    def place(self) -> int:
        assert self.row is not None, "nothing was drawn yet"
        return self.row
