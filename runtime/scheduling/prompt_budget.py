"""How many prompt tokens a step may have beside running streams."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import isfinite

from atomc.runtime.scheduling.step import ScheduledStep

LEAST_TOKENS = 16  # of a step, so that prompts always end
FIRST_TOKENS = 64  # before any step with prompts was measured
AIM = 0.9  # of the limit, because steps of equal sizes take different times
LONGEST = 2.0  # times the limit: longer steps are outliers, or tell no more
BASE_WEIGHT, SLOPE_WEIGHT = 0.1, 0.5  # of the last step; of a slope that falls
GROWTH = 1.5  # of the largest prompts that were measured
FORGOTTEN = 0.05  # share of the largest prompts that each step with prompts forgets


class PromptBudget:
    """The prompt tokens with which a step takes at most max_itl_ms, by the times of earlier steps.

    A step takes base + slope * tokens: the base is a mean of steps without prompts; the slope is
    one of the last steps with prompts, larger ones counting more, and so follows what lines do not
    describe. The budget grows step by step, beyond what was measured by half or to the next size.

    most    tokens of a step
    sizes   ascending: a step is padded to the next of these numbers of rows; () without padding
    """

    def __init__(self, max_itl_ms: float, most: int, sizes: Sequence[int] = ()) -> None:
        self._limit, self._most, self._sizes = max_itl_ms, most, sizes
        self._base = self._slope = 0.0
        self._largest = FIRST_TOKENS / GROWTH
        self._ended = 0.0  # when the step before did, in seconds

    def measured(self, step: ScheduledStep, began: float, ended: float) -> None:
        """A step took the time since its call began, or since the end of the step before; in
        seconds. ended: infinite if it is not known.
        """
        start, self._ended = max(self._ended, began), ended
        if isfinite(ended - start):
            self.add(step, 1e3 * (ended - start))

    def add(self, step: ScheduledStep, milliseconds: float) -> None:
        """A step has taken so long."""
        rows, prompts = step.padded_size.rows, step.num_prompt_tokens
        if not prompts:
            milliseconds = min(milliseconds, self._limit)
            self._base += (milliseconds - self._base) * (BASE_WEIGHT if self._base else 1)
            return
        tokens = prompts + self._padded(rows) - rows
        self._largest = max(tokens, self._largest * (1 - FORGOTTEN))
        excess = max(min(milliseconds, LONGEST * self._limit) - self._base, 0.0)
        slope, share = excess / tokens, tokens / self._largest
        # Few tokens are often cheaper each than many.
        weight = share if slope > self._slope else SLOPE_WEIGHT * share**3
        self._slope += (slope - self._slope) * (weight if self._slope else 1)

    def tokens(self, streams: int) -> int:
        """Prompt tokens of the next step, beside so many rows of streams."""
        rows = streams + int(self._largest)
        rows = max(streams + int(GROWTH * self._largest), self._padded(rows + 1))
        if self._slope:
            tokens = max(AIM * self._limit - self._base, 0.0) / self._slope
            rows = min(rows, streams + int(tokens))
        if self._sizes and rows < self._sizes[-1]:
            fitting = self._sizes[: bisect_right(self._sizes, rows)]
            least = streams + LEAST_TOKENS
            # Padding costs as much as tokens.
            rows = fitting[-1] if fitting and fitting[-1] >= least else self._padded(least)
        return min(max(rows - streams, LEAST_TOKENS), self._most)

    def _padded(self, rows: int) -> int:
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else rows
