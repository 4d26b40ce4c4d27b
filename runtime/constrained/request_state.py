"""State of a request in the engine, besides the scheduler's Request."""

from dataclasses import dataclass, field

from atomc.runtime.constrained.allowed_tokens import AllowedTokens
from atomc.runtime.constrained.grammar_compiler import GrammarMatcher
from atomc.runtime.constrained.reasoning_budget import ReasoningBudget
from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.scheduling.speculative import NGramProposer


@dataclass
class RequestState:
    """Dropped when the request ends.

    matcher    grammar state of its structured output
    allowed    the tokens of allowed_token_ids and bad_words
    budget     of its reasoning
    proposer   proposes its drafts, with n-gram speculation
    draft      proposed by the draft model after its last token
    scores     prompt log-probabilities, until its first token
    """

    matcher: GrammarMatcher | None = None
    allowed: AllowedTokens | None = None
    budget: ReasoningBudget | None = None
    proposer: NGramProposer | None = None
    draft: tuple[int, ...] = ()
    scores: list[TokenLogprobs] = field(default_factory=list)

    def mask_depends_on_output(self, num_output: int) -> bool:
        """Whether the tokens that must not be sampled after so many depend on them."""
        return (
            self.matcher is not None
            or (self.allowed is not None and self.allowed.depends_on_output)
            or (self.budget is not None and self.budget.may_apply(num_output))
        )
