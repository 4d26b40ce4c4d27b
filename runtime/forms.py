"""Forms of output (structured output): compiled when a request comes, and followed token by token.

They are on the scheduler's side: a form follows the tokens that the scheduler has accepted, is compiled once for all
workers, and ends its request where it goes wrong. A worker only gets the mask of a step.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from atomc.runtime.fence import Fence, RequestError, RequestFailed, is_contained, is_panic
from atomc.runtime.sampling_params import Structured
from atomc.runtime.step import ScheduledStep
from atomc.runtime.structured import Grammars, Matcher


class Forms:
    """Matchers of requests, and the masks that they make.

    grammars   makes what compiles forms of output; called when the first request asks for one
    fence      keeps what went wrong for single requests
    """

    def __init__(self, grammars: Callable[[], Grammars], fence: Fence) -> None:
        self.fence = fence
        self._make_grammars = grammars
        self._grammars: Grammars | None = None

    def grammars(self) -> Grammars:
        """What compiles forms of output. Raises as `matcher` does."""
        self._grammars = self._grammars or self._make_grammars()
        return self._grammars

    def matcher(self, structured: Structured) -> Matcher:
        """For a request whose output must look like this. Raises ValueError if it cannot be compiled, ImportError without
        the library for it."""
        try:
            return self.grammars().compile(structured).matcher()
        except RecursionError as error:
            raise ValueError("structured output: its description is nested too deep to be compiled") from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise ValueError(f"structured output: its description cannot be compiled: {_line(error)}") from error

    def mask(self, step: ScheduledStep, matchers: Mapping[str, Matcher]) -> Tensor | None:
        """The tokens that may be drawn, [num_draws, W] i32 (see Grammars.mask); None: all. matchers: by request."""
        rows, row = {}, 0
        for chunk in step.chunks:
            if chunk.num_draws and (matcher := matchers.get(chunk.request_id)) is not None:
                rows[chunk.request_id] = (matcher, row, chunk.draft)
            row += chunk.num_draws
        if not rows:
            return None
        mask = self.grammars().mask(row)
        try:
            self.grammars().fill(mask, list(rows.values()))
        except BaseException as error:
            if not is_contained(error):
                raise
            for request_id, one in rows.items():
                self.fence.run(request_id, "masking tokens that its form does not allow", self.grammars().fill, mask, [one])
        return mask


def follow(matcher: Matcher, tokens: Sequence[int]) -> None:
    """Note new tokens. Raises RequestFailed if the form does not allow them, which happens only to a form that became too
    large on the way, or that has no end."""
    if not all([matcher.accept(token) for token in tokens]):
        why = _line(matcher.error)
        said = "no token can continue the form of output that was asked for" + (f": {why}" if why else "")
        raise RequestFailed(RequestError(said, by_client=True))


def _line(text: object) -> str:
    """The first line of what a library says, without its state."""
    return next(iter(str(text).splitlines()), "").strip()
