"""Compiles grammars of structured output, and computes bit masks of the tokens that may come next.

A row of a mask has W words of 32 bits.
"""

import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atomc.runtime.constrained.grammar_source import parser_limits
from atomc.runtime.constrained.grammar_validator import GrammarValidator
from atomc.runtime.requests.sampling_params import Structured
from atomc.runtime.text.detokenizer import Tokenizer, TokenTexts

if TYPE_CHECKING:  # optional
    from llguidance import LLMatcher

# The least size that a grammar counts as.
MIN_GRAMMAR_BYTES = 2**16
# Memory limit for compiling one grammar.
COMPILE_MEMORY_BYTES = 2**28
# Number of rejected grammars whose error is kept.
MAX_REFUSED = 64
# If the masks of a step take longer, the next step times each matcher, to find the slow one.
SLOW_SECONDS = 0.05


def full_mask(num_rows: int, vocab_size: int) -> Tensor:
    """A mask [num_rows, ceil(vocab_size / 32)] i32 that allows everything; pinned if there is a
    GPU. Token t is bit t % 32 of word t // 32.
    """
    num_words = -(-vocab_size // 32)
    return torch.full(
        (num_rows, num_words), -1, dtype=torch.int32, pin_memory=torch.cuda.is_available()
    )


class GrammarCompiler:
    """Compiles and caches the grammars of requests. Thread-safe.

    eos_ids       tokens that can end an output
    vocab_size    the model's; tokens that the tokenizer does not have are never allowed
    seconds       CPU time limit for compiling one grammar
    cache_bytes   size of the LRU cache of compiled grammars

    A grammar's size is the memory that its validation took (GrammarValidator). Raises ImportError,
    naming the extra to install, if llguidance is missing, and ValueError for empty eos_ids.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        eos_ids: frozenset[int],
        vocab_size: int,
        *,
        seconds: float = 5.0,
        cache_bytes: int = 2**29,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ImportError(
                "structured output needs the library `llguidance`: pip install 'atomc[serve]'"
            ) from error
        if not eos_ids:
            raise ValueError(
                "structured output needs an end-of-sequence token: the model has no eos_token_id "
                "in generation_config.json or config.json"
            )
        self.eos_ids = eos_ids
        self.vocab_size = max(vocab_size, tokenizer.get_vocab_size())
        self.cache_bytes = cache_bytes
        self._library = llguidance
        text = _tokenizer_json(tokenizer)
        self._validator = GrammarValidator(
            text, self.vocab_size, eos_ids, seconds=seconds, memory=COMPILE_MEMORY_BYTES
        )
        self._validator.start()
        self._tokens = llguidance.LLTokenizer(
            text, n_vocab=self.vocab_size, eos_token=sorted(eos_ids)
        )
        self._limits = parser_limits()
        self._executor = llguidance.LLExecutor()
        self._lock = threading.Lock()
        self._cache: OrderedDict[Structured, CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[Structured, str] = OrderedDict()
        # Cached grammars, and those of running requests.
        self._live: weakref.WeakValueDictionary[Structured, CompiledGrammar] = (
            weakref.WeakValueDictionary()
        )
        self._slow = False

    @property
    def num_bytes(self) -> int:
        """Memory of all grammars: cached ones, and those of running requests."""
        return sum(grammar.num_bytes for grammar in list(self._live.values()))

    def is_cached(self, structured: Structured) -> bool:
        """Whether `compile` returns or raises without compiling."""
        with self._lock:
            return structured in self._live or structured in self._refused

    def compile(self, structured: Structured) -> "CompiledGrammar":
        """Raises ValueError with the reason if the grammar cannot be compiled within the limits."""
        with self._lock:
            if (live := self._live.get(structured)) is not None:
                self._mark_used(structured, live)
                return live
            if (refused := self._refused.get(structured)) is not None:
                raise ValueError(refused)
        try:
            grammar = self._compile(structured)
        except ValueError as error:
            with self._lock:
                self._refused[structured] = str(error)
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._live[structured] = grammar
            self._mark_used(structured, grammar)
        return grammar

    def _mark_used(self, structured: Structured, grammar: "CompiledGrammar") -> None:
        """Mark as most recently used, and evict the least recently used grammars."""
        self._cache[structured] = grammar
        self._cache.move_to_end(structured)
        while (
            len(self._cache) > 1
            and sum(each.num_bytes for each in self._cache.values()) > self.cache_bytes
        ):
            self._cache.popitem(last=False)

    def _compile(self, structured: Structured) -> "CompiledGrammar":
        validated = self._validator.run(structured)
        start = self._library.LLMatcher(
            self._tokens, validated.text, log_level=0, limits=self._limits
        )
        start.compute_bitmask()  # the first mask is the slowest; all copies of the matcher share it
        return CompiledGrammar(start, self.eos_ids, max(validated.num_bytes, MIN_GRAMMAR_BYTES))

    def fill(
        self, mask: Tensor, rows: "Sequence[tuple[GrammarMatcher, int, Sequence[int]]]"
    ) -> None:
        """Set rows of a mask, for all matchers in parallel.

        rows   (matcher, row, draft): sets `row`, and one further row for each token of the draft,
               as if the tokens before it had been accepted. Rows after a token that is not allowed
               are left unchanged.
        """
        place = (mask.data_ptr(), mask.shape[1] * mask.element_size(), mask.shape[0])
        began = time.perf_counter()
        single = [(matcher, row) for matcher, row, draft in rows if not draft]
        if self._slow:
            self._fill_one_by_one(mask, single)
        elif single:
            inner = [(matcher.inner, row) for matcher, row in single]
            self._executor.unsafe_compute_mask_ptr(inner, *place)
        drafted = [(matcher.inner, row, list(draft)) for matcher, row, draft in rows if draft]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        self._slow = not self._slow and time.perf_counter() - began > SLOW_SECONDS

    def _fill_one_by_one(self, mask: Tensor, rows: "Sequence[tuple[GrammarMatcher, int]]") -> None:
        """As `fill`, but stops the matchers that exceed SLOW_SECONDS, because they delay all
        others.
        """
        for matcher, row in rows:
            began = time.thread_time()
            matcher.inner.unsafe_compute_mask_ptr(
                mask[row].data_ptr(), mask.shape[1] * mask.element_size()
            )
            if time.thread_time() - began > SLOW_SECONDS:
                matcher.stop_reason = (
                    "computing the mask exceeded the limit of "
                    f"{1000 * SLOW_SECONDS:.0f} ms per step"
                )


@dataclass(eq=False)
class CompiledGrammar:
    """A compiled grammar, for any number of requests."""

    _start: "LLMatcher"
    eos_ids: frozenset[int]
    num_bytes: int

    def matcher(self) -> "GrammarMatcher":
        """A matcher for a new request."""
        return GrammarMatcher(self, self._start.deep_copy())


@dataclass(eq=False)
class GrammarMatcher:
    """The state of one request's output in its grammar.

    grammar       kept in the count of used memory
    finished      an end-of-sequence token was accepted; no token may follow
    stop_reason   why the matcher accepts no more tokens; empty if it does
    """

    grammar: CompiledGrammar
    inner: "LLMatcher"
    finished: bool = False
    stop_reason: str = ""

    @property
    def complete(self) -> bool:
        """Whether the output may end here."""
        return bool(self.inner.is_accepting()) and not self.error

    @property
    def error(self) -> str:
        """Why the matcher stopped, such as a limit of llguidance; empty if it did not."""
        return self.stop_reason or str(self.inner.get_error())

    def accept(self, token: int) -> bool:
        """Accept the token if it is allowed; returns whether it is."""
        if self.finished or self.stop_reason:
            return False
        if token in self.grammar.eos_ids:
            self.finished = self.complete
            return self.finished
        return bool(self.inner.try_consume_tokens([token]) == 1)


def _tokenizer_json(tokenizer: "Tokenizer") -> str:
    """The tokenizer as JSON, with the added tokens that are text, such as <think>, in its
    vocabulary: llguidance allows no added token in the form <...> in a text.
    """
    fields = json.loads(tokenizer.to_str())
    fields |= {"padding": None, "truncation": None}
    vocabulary, added = fields["model"]["vocab"], fields["added_tokens"]
    texts = [token for token in added if not token["special"]]
    if isinstance(vocabulary, dict):
        fields["added_tokens"] = [token for token in added if token["special"]]
        encoded = TokenTexts(tokenizer).vocabulary_text
        vocabulary |= {encoded(token["content"]): token["id"] for token in texts}
    return json.dumps(fields, ensure_ascii=False)
