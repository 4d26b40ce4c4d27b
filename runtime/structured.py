"""Output of a given form: which tokens may come next, as bits that the sampler applies.

W words of 32 bits are one row of a mask.
"""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from atomc.runtime.sampling_params import Structured

# No spaces between tokens of JSON, of which a small model else writes many. A schema may say it otherwise, under
# "x-guidance".
_JSON: Any = {"whitespace_flexible": False}


class Grammars:
    """Compiles what requests ask for; the `capacity` used last stay compiled.

    tokenizer    a `tokenizers.Tokenizer`, or a transformers tokenizer that has one inside
    eos_ids      tokens with which an output may end
    vocab_size   tokens of the model; it may have more than the tokenizer, and they are never drawn

    Raises ImportError, naming the extra to install, if the library is missing, ValueError if the tokenizer or eos_ids
    will not do.
    """

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocab_size: int, *, capacity: int = 128) -> None:
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
        self._library = llguidance
        self._tokens = llguidance.LLTokenizer(_unpadded(inner), n_vocab=self.vocab_size, eos_token=sorted(eos_ids))
        self._executor = llguidance.LLExecutor()
        self.compile: Callable[[Structured], Grammar] = lru_cache(capacity)(self._compile)

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
        single = [(matcher.inner, row) for matcher, row, draft in rows if not draft]
        if single:
            self._executor.unsafe_compute_mask_ptr(single, *place)
        drafted = [(matcher.inner, row, list(draft)) for matcher, row, draft in rows if draft]
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)

    def _compile(self, structured: Structured) -> "Grammar":
        """Raises ValueError, with what is wrong, for what cannot be compiled."""
        name, text = self._grammar(structured)
        failed, messages = self._library.LLMatcher.validate_grammar_with_warnings(text, self._tokens)
        if failed:
            raise ValueError(f"{name}: {messages[0].strip()}")
        matcher = self._library.LLMatcher(self._tokens, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"{name}: {matcher.get_error().strip()}")
        return Grammar(matcher, self.eos_ids)

    def _grammar(self, structured: Structured) -> tuple[str, str]:
        """Which field is given, and it in the library's own language."""
        of = self._library.LLMatcher
        if structured.regex is not None:
            return "regex", of.grammar_from_regex(structured.regex)
        if structured.choice is not None:
            return "choice", of.grammar_from_regex("|".join(map(_literal, structured.choice)))
        if structured.grammar is not None:
            return "grammar", of.grammar_from_lark(structured.grammar)
        if structured.json_object:
            return "json_object", of.grammar_from_json_schema({"type": "object"}, defaults=_JSON)
        try:
            schema = json.loads(str(structured.json_schema))
        except ValueError as error:
            raise ValueError(f"json_schema is no JSON: {error}") from error
        if not isinstance(schema, dict):
            raise ValueError(f"json_schema is {schema!r}, expected an object")
        return "json_schema", of.grammar_from_json_schema(schema, defaults=_JSON)


class Grammar:
    """A compiled form, for any number of outputs."""

    def __init__(self, start: Any, eos_ids: frozenset[int]) -> None:
        self._start = start
        self._eos_ids = eos_ids

    def matcher(self) -> "Matcher":
        """For a new output."""
        return Matcher(self._start.deep_copy(), self._eos_ids)


class Matcher:
    """How far one output has come. `finished`: an end-of-sequence token came, nothing may follow."""

    def __init__(self, inner: Any, eos_ids: frozenset[int]) -> None:
        self.inner = inner
        self._eos_ids = eos_ids
        self.finished = False

    @property
    def complete(self) -> bool:
        """The output may end here."""
        return bool(self.inner.is_accepting()) and not self.error

    @property
    def error(self) -> str:
        """Why it gave up on a form that became too large on the way; empty: it did not."""
        return str(self.inner.get_error())

    def accept(self, token: int) -> bool:
        """Whether the token may come next; if so, it came."""
        if self.finished:
            return False
        if token in self._eos_ids:
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


def _literal(text: str) -> str:
    """A regular expression that matches this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
