"""Output of a given form: which tokens may come next, as bits that the sampler applies.

W words of 32 bits are one row of a mask.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from atomc.runtime.grammar_source import parser_limits
from atomc.runtime.grammar_trial import GrammarTrial
from atomc.runtime.sampling_params import Structured

# A grammar that compiles to less counts as this.
LEAST_BYTES = 2**16
# That one grammar may take to compile.
GRAMMAR_MEMORY = 2**28
# Refusals that are remembered.
MOST_REFUSED = 64
# A step whose masks take longer makes the next one look for the matcher that is slow.
SLOW_SECONDS = 0.05


class Grammars:
    """Compiles what requests ask for. Any thread may compile.

    tokenizer    a `tokenizers.Tokenizer`, or a transformers tokenizer that has one inside
    eos_ids      tokens with which an output may end
    vocab_size   tokens of the model; it may have more than the tokenizer, and they are never drawn
    seconds      processor time for one grammar
    cache_bytes  memory of grammars that stay compiled, the last used ones

    A grammar's memory is what its trial took (GrammarTrial). Raises ImportError, naming the extra to install, if the
    library is missing, ValueError if the tokenizer or eos_ids will not do.
    """

    def __init__(
        self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int, *, seconds: float = 5.0, cache_bytes: int = 2**29
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ImportError("structured output needs the library `llguidance`: pip install 'atomc[serve]'") from error
        if not eos_ids:
            raise ValueError("structured output needs an end-of-sequence token, and the model names none "
                             "(eos_token_id in generation_config.json or config.json)")  # fmt: skip
        inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(inner, "to_str"):
            raise ValueError(f"structured output needs a tokenizer with a tokenizer.json, not {type(tokenizer).__name__}")
        self.eos_ids = eos_ids
        self.vocab_size = max(vocab_size, inner.get_vocab_size())
        self.cache_bytes = cache_bytes
        self._library = llguidance
        text = _unpadded(inner)
        self._trial = GrammarTrial(text, self.vocab_size, eos_ids, seconds=seconds, memory=GRAMMAR_MEMORY)
        self._trial.start()
        self._tokens = llguidance.LLTokenizer(text, n_vocab=self.vocab_size, eos_token=sorted(eos_ids))
        self._limits = parser_limits()
        self._executor = llguidance.LLExecutor()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Structured, Grammar] = OrderedDict()
        self._refused: OrderedDict[Structured, str] = OrderedDict()
        # Those that are kept, and those of running outputs.
        self._living: weakref.WeakValueDictionary[Structured, Grammar] = weakref.WeakValueDictionary()
        self._slow = False

    @property
    def num_bytes(self) -> int:
        """Memory of all grammars, those that are kept and those of running outputs."""
        return sum(grammar.num_bytes for grammar in list(self._living.values()))

    def known(self, structured: Structured) -> bool:
        """Whether `compile` answers at once."""
        with self._lock:
            return structured in self._living or structured in self._refused

    def compile(self, structured: Structured) -> "Grammar":
        """Raises ValueError, with what is wrong, for what cannot be compiled within the limits."""
        with self._lock:
            if (found := self._living.get(structured)) is not None:
                self._keep(structured, found)
                return found
            if (refused := self._refused.get(structured)) is not None:
                raise ValueError(refused)
        try:
            grammar = self._compile(structured)
        except ValueError as error:
            with self._lock:
                self._refused[structured] = str(error)
                if len(self._refused) > MOST_REFUSED:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            self._living[structured] = grammar
            self._keep(structured, grammar)
        return grammar

    def _keep(self, structured: Structured, grammar: "Grammar") -> None:
        """As the last used one."""
        self._kept[structured] = grammar
        self._kept.move_to_end(structured)
        while len(self._kept) > 1 and sum(each.num_bytes for each in self._kept.values()) > self.cache_bytes:
            self._kept.popitem(last=False)

    def _compile(self, structured: Structured) -> "Grammar":
        tried = self._trial.run(structured)
        start = self._library.LLMatcher(self._tokens, tried.text, log_level=0, limits=self._limits)
        start.compute_bitmask()  # the first one takes longest, and is the start of all copies
        return Grammar(start, self.eos_ids, max(tried.num_bytes, LEAST_BYTES))

    def mask(self, num_rows: int) -> Tensor:
        """A mask [num_rows, W] i32 that allows everything; pinned if there is a GPU."""
        num_words = -(-self.vocab_size // 32)
        return torch.full((num_rows, num_words), -1, dtype=torch.int32, pin_memory=torch.cuda.is_available())

    def fill(self, mask: Tensor, rows: "Sequence[tuple[Matcher, int, Sequence[int]]]") -> None:
        """Set rows of a mask, of several matchers in parallel.

        For (matcher, row, draft) that is `row`, and behind it one for each token of the draft, as if those before it
        had been accepted. What follows a token that is not allowed stays as it is.
        """
        place = (mask.data_ptr(), mask.shape[1] * mask.element_size(), mask.shape[0])
        began = time.perf_counter()
        single = [(matcher.inner, row) for matcher, row, draft in rows if not draft]
        if self._slow:
            self._fill_one_by_one(mask, [(matcher, row) for matcher, row, draft in rows if not draft])
        elif single:
            self._executor.unsafe_compute_mask_ptr(single, *place)
        drafted = [(matcher.inner, row, list(draft)) for matcher, row, draft in rows if draft]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        self._slow = not self._slow and time.perf_counter() - began > SLOW_SECONDS

    def _fill_one_by_one(self, mask: Tensor, rows: "Sequence[tuple[Matcher, int]]") -> None:
        """The same, and the outputs whose masks take too long end: all others wait for them."""
        for matcher, row in rows:
            began = time.thread_time()
            matcher.inner.unsafe_compute_mask_ptr(mask[row].data_ptr(), mask.shape[1] * mask.element_size())
            if time.thread_time() - began > SLOW_SECONDS:
                matcher.gave_up = f"to find tokens that may come next takes more than {1000 * SLOW_SECONDS:.0f} ms a step"


class Grammar:
    """A compiled form, for any number of outputs."""

    def __init__(self, start: Any, eos_ids: frozenset[int], num_bytes: int) -> None:
        self._start = start
        self.eos_ids = eos_ids
        self.num_bytes = num_bytes

    def matcher(self) -> "Matcher":
        """For a new output."""
        return Matcher(self, self._start.deep_copy())


class Matcher:
    """How far one output has come. `finished`: an end-of-sequence token came, nothing may follow.

    gave_up   why no token is accepted any more; empty: they are
    """

    def __init__(self, grammar: Grammar, inner: Any) -> None:
        self.grammar = grammar  # its memory is in use as long as this is
        self.inner = inner
        self.finished = False
        self.gave_up = ""

    @property
    def complete(self) -> bool:
        """The output may end here."""
        return bool(self.inner.is_accepting()) and not self.error

    @property
    def error(self) -> str:
        """Why it gave up on a form that became too large on the way; empty: it did not."""
        return self.gave_up or str(self.inner.get_error())

    def accept(self, token: int) -> bool:
        """Whether the token may come next; if so, it came."""
        if self.finished or self.gave_up:
            return False
        if token in self.grammar.eos_ids:
            self.finished = self.complete
            return self.finished
        return bool(self.inner.try_consume_tokens([token]) == 1)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        if self.finished and num_tokens:
            self.finished = False
            num_tokens -= 1
        if num_tokens and not self.inner.rollback(num_tokens):
            raise ValueError(f"{num_tokens} tokens to take back, more than were accepted")


def _unpadded(tokenizer: Any) -> str:
    """The tokenizer as text, as it is without padding and truncation."""
    copied = type(tokenizer).from_str(tokenizer.to_str())
    copied.no_padding()
    copied.no_truncation()
    return str(copied.to_str())
