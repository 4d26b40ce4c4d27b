"""Structured output: creates the matcher of each request, and the token masks of each step.

This runs on the scheduler's side: a matcher accepts the tokens that the scheduler accepted, and
fails its request if it stops. A worker only gets the mask of a step.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atomc.errors import first_line
from atomc.runtime.constrained.grammar_compiler import GrammarCompiler, GrammarMatcher, full_mask
from atomc.runtime.requests.request_errors import (
    RequestError,
    RequestErrors,
    RequestFailed,
    is_recoverable,
)
from atomc.runtime.requests.sampling_params import Structured
from atomc.torch_compat.exceptions import is_failure

log = logging.getLogger("atomc")
# As in GrammarCompiler.fill.
MaskedRows = tuple[GrammarMatcher, int, Sequence[int]]


@dataclass(eq=False)
class StructuredMatchers:
    """Creates matchers and masks.

    create_compiler   creates the compiler, when the first request needs it
    request_errors    collects the errors of single requests
    """

    create_compiler: Callable[[], GrammarCompiler]
    request_errors: RequestErrors
    _compiler: GrammarCompiler | None = None

    def compiler(self) -> GrammarCompiler:
        """The grammar compiler. Raises as GrammarCompiler does."""
        self._compiler = self._compiler or self.create_compiler()
        return self._compiler

    def matcher(self, structured: Structured) -> GrammarMatcher:
        """A matcher for a new request. Raises ValueError if the grammar cannot be compiled,
        ImportError without llguidance."""
        try:
            return self.compiler().compile(structured).matcher()
        except RecursionError as error:
            raise ValueError(
                "structured output: the grammar is nested too deeply to be compiled"
            ) from error
        except BaseException as error:  # a panic in Rust is no Exception
            if isinstance(error, Exception) or not is_failure(error):
                raise
            raise ValueError(
                f"structured output: the grammar cannot be compiled: {first_line(error)}"
            ) from error

    def mask(self, num_rows: int, rows: Mapping[str, MaskedRows]) -> Tensor:
        """The mask of allowed tokens, [num_rows, W] i32 (see full_mask). rows: by request id."""
        mask = full_mask(num_rows, self.compiler().vocab_size)
        try:
            self.compiler().fill(mask, list(rows.values()))
        except BaseException as error:  # a panic in Rust is no Exception
            if not is_recoverable(error):
                raise
            log.warning("the masks of a step failed, each is computed alone", exc_info=error)
            for request_id, one in rows.items():
                self.request_errors.run(
                    request_id, "computing its grammar mask", self.compiler().fill, mask, [one]
                )
        return mask


def accept_tokens(matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
    """Accept sampled tokens. Raises RequestFailed if the grammar does not allow them: the masks
    prevent that, except if a limit of the matcher stopped it, or if no token was allowed."""
    if not all([matcher.accept(token) for token in tokens]):
        reason = first_line(matcher.error)
        message = "no token can continue the requested structured output" + (
            f": {reason}" if reason else ""
        )
        raise RequestFailed(RequestError(message, by_client=True))
