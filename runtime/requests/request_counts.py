"""The row of TokenCounts that belongs to a request. Does not import torch."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class RequestCounts:
    """Token counts of one request while it has a slot.

    tokens   prompt and output tokens until the first sampling counts them, then []
    row      its row in TokenCounts; None before the first sampling
    length   number of counted tokens, plus up to `pending` known only on the device; 0 before the
             first sampling
    """

    num_prompt: int
    tokens: list[int] = field(default_factory=list)
    row: int | None = None
    length: int = 0
    pending: int = 0

    @property
    def assigned_row(self) -> int:
        assert self.row is not None, "no token was sampled yet"
        return self.row
