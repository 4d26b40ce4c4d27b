"""Sampling parameters of a request."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

MIN_TEMPERATURE = 1e-4
# Range of repetition_penalty; beyond it, logits may become infinite.
PENALTIES = (1e-6, 1e6)


@dataclass(frozen=True)
class Structured:
    """A constraint on the output; exactly one of the first five fields.

    json_schema            JSON that is valid under this schema, a mapping or text; stored as text
    json_object            any JSON object
    regex                  text that the regular expression fully matches
    choice                 one of these texts
    grammar                text that matches this Lark grammar
    additional_properties  objects of json_schema may have properties that it does not name, as
                           JSON Schema defines; False: only where it says so
    adapts_schemas         the same holds for `rule: %json {...}` in a line of grammar

    Raises ValueError for no field or several. Whether it compiles is checked in
    atomc.runtime.constrained.grammar_compiler.
    """

    json_schema: Mapping[str, Any] | str | None = None  # msgspec decodes no recursive types
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    additional_properties: bool = False
    adapts_schemas: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping):
            # Unsorted, because properties are generated in the order of the schema.
            object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", tuple(self.choice))
            if not self.choice or "" in self.choice:
                raise ValueError(
                    f"choice is {list(self.choice)}, expected at least one text and no empty text"
                )
        set_fields = [
            name
            for name in ("json_schema", "regex", "choice", "grammar")
            if getattr(self, name) is not None
        ]
        set_fields += ["json_object"] * self.json_object
        if len(set_fields) != 1:
            raise ValueError(
                f"structured output has {' and '.join(set_fields) or 'nothing'}, expected exactly "
                "one of json_schema, json_object, regex, choice and grammar"
            )


class ParameterError(ValueError):
    """A parameter is out of range. name: the parameter."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


@dataclass(frozen=True)
class SamplingParams:
    """How to sample the output of a request.

    max_tokens           maximum number of new tokens; None: as many as fit
    temperature          0: greedy; otherwise logits are divided by it
    top_k                keep the n most likely tokens; 0: all
    top_p                keep the most likely tokens with this total probability, after top_k
    min_p                keep tokens with at least this probability relative to the most likely one
    seed                 None: a different one per request; results for a seed do not depend on the
                         batch
    stop_token_ids       tokens that end generation, in addition to the model's end-of-sequence
                         tokens
    ignore_eos           do not stop at the model's end-of-sequence tokens
    n                    number of completions per prompt
    min_tokens           number of new tokens before a stop or end-of-sequence token is allowed
    repetition_penalty   divides the positive and multiplies the negative logits of tokens in prompt
                         and output; from 1e-6 to 1e6
    presence_penalty     subtracted from the logits of tokens in the output
    frequency_penalty    the same, times the number of occurrences
    logit_bias           added to the logits of these token ids
    allowed_token_ids    sample no other tokens; None: all
    bad_words            texts, or lists of token ids, that the output must not contain. A text
                         stands for its tokens, with and without a space before it
    stop                 texts that end generation
    include_stop_str_in_output   keep the stop text in the output
    logprobs             number of most likely tokens whose log-probabilities to return, besides the
                         sampled token's
    prompt_logprobs      the same for prompt tokens
    structured           a constraint on the output
    thinking_token_budget   maximum number of tokens of the reasoning between <think> and </think>,
                         with its tags: then, or at the end of a sentence up to 16 tokens before,
                         the closing tag follows. Both tags must be tokens
    thinking_is_open     whether the output begins within the reasoning; None: if the last tag of
                         the prompt is an opening one
    skip_special_tokens  leave special tokens out of the text
    truncate_prompt_tokens   keep only this many tokens of the prompt, its last ones; -1: as many as
                         leave room for max_tokens

    Penalties and bias apply first, then temperature, top_k, top_p and min_p. Log-probabilities are
    the model's, before all of these. Raises ParameterError, a ValueError, for values out of range.
    """

    max_tokens: int | None = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structured | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    truncate_prompt_tokens: int | None = None
    thinking_token_budget: int | None = None
    thinking_is_open: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(
            self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        )
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        self._check_counts()
        self._check_bad_words()
        self._check_distribution()
        self._check_tokens()
        self._check_structured()

    def _check_counts(self) -> None:
        expect = self._expect
        least_values = {
            "n": 1,
            "max_tokens": 1,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "thinking_token_budget": 0,
        }
        for name, least in least_values.items():
            value = getattr(self, name)
            expect(name, value is None or value >= least, f"at least {least}")
        longest = math.inf if self.max_tokens is None else self.max_tokens
        expect(
            "min_tokens",
            0 <= self.min_tokens <= longest,
            f"at least 0 and at most max_tokens={self.max_tokens}",
        )
        size = self.truncate_prompt_tokens
        expect(
            "truncate_prompt_tokens",
            size is None or size == -1 or size >= 1,
            "at least 1, or -1 (as many as fit)",
        )

    def _check_bad_words(self) -> None:
        words = self.bad_words
        expectation = "a list of texts that are not blank, or of lists of token ids"
        self._expect("bad_words", not isinstance(words, str), expectation)
        words = tuple(word if isinstance(word, str) else tuple(word) for word in words)
        object.__setattr__(self, "bad_words", words)
        for word in words:
            good = word.strip() if isinstance(word, str) else word and min(word) >= 0
            self._expect("bad_words", bool(good), expectation)

    def _check_distribution(self) -> None:
        expect = self._expect
        expect(
            "temperature",
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        expect("top_k", self.top_k >= 0, "0 (all tokens) or positive")
        expect("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        expect("min_p", 0.0 <= self.min_p <= 1.0, "at least 0 and at most 1")
        least, most = PENALTIES
        expect(
            "repetition_penalty",
            least <= self.repetition_penalty <= most,
            f"at least {least} and at most {most:.0f} (1: none)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            expect(name, -2.0 <= getattr(self, name) <= 2.0, "at least -2 and at most 2 (0: none)")
        expect("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a number of 64 bits")

    def _check_tokens(self) -> None:
        expect = self._expect
        expect(
            "logit_bias",
            all(token >= 0 and -100.0 <= bias <= 100.0 for token, bias in self.logit_bias.items()),
            "token ids with numbers from -100 to 100",
        )
        expect("stop", "" not in self.stop, "texts that are not empty")
        expect(
            "stop_token_ids",
            all(token >= 0 for token in self.stop_token_ids),
            "token ids, which are not negative",
        )
        allowed = self.allowed_token_ids
        expect(
            "allowed_token_ids",
            allowed is None or (len(allowed) > 0 and min(allowed) >= 0),
            "at least one token id, and none that is negative",
        )

    def _check_structured(self) -> None:
        """Structured output ends by its grammar alone."""
        if self.structured is not None:
            reason = "with structured output, which determines its own end"
            self._expect("min_tokens", self.min_tokens == 0, f"0 {reason}")
            self._expect("ignore_eos", not self.ignore_eos, f"False {reason}")
            budget = self.thinking_token_budget
            reason = "with structured output, which constrains the reasoning too"
            self._expect("thinking_token_budget", budget is None, f"None {reason}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError if a token id, or a number of log-probabilities, exceeds the
        vocabulary.
        """
        for name in ("logit_bias", "allowed_token_ids"):
            token = max(getattr(self, name) or (), default=-1)
            if token >= vocab_size:
                raise ValueError(
                    f"{name} has token {token}, the vocabulary has {vocab_size} tokens"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, the vocabulary has {vocab_size} tokens"
                )

    @cached_property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (
            1.0,
            0.0,
            0.0,
        )

    @cached_property
    def constraints(self) -> tuple[str, ...]:
        """The parameters because of which some tokens must not be sampled."""
        is_set = {
            "structured output": self.structured is not None,
            "allowed_token_ids": self.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            "thinking_token_budget": self.thinking_token_budget is not None,
        }
        return tuple(name for name, is_given in is_set.items() if is_given)

    @cached_property
    def only_largest(self) -> bool:
        """Whether only the largest logit is read, unless a mask excludes some."""
        changed = self.penalized or self.logit_bias or self.min_tokens
        return self.temperature == 0 and self.logprobs is None and not changed

    @cached_property
    def is_plain(self) -> bool:
        """Whether a token depends on the model's logits and a random number alone, and nothing else
        is returned.
        """
        changed = self.penalized or self.logit_bias or self.min_tokens or self.constraints
        return not changed and self.logprobs is None and self.prompt_logprobs is None

    @cached_property
    def distribution(self) -> tuple[float, float, float, float]:
        """temperature, top_k, top_p and min_p."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    @cached_property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def _expect(self, name: str, holds: bool, expectation: str) -> None:
        if not holds:
            raise ParameterError(
                name, f"{name} is {getattr(self, name)!r}, it must be {expectation}"
            )


def truncated(
    tokens: Sequence[int], size: int | None, *, max_tokens: int | None, max_len: int
) -> list[int]:
    """The last `size` tokens; -1: as many as leave room for max_tokens (None: for one); None: all.

    max_len   maximum sequence length in tokens

    Raises ParameterError for another size, and for one above max_len.
    """
    if size is None:
        return list(tokens)
    if size not in range(1, max_len + 1) and size != -1:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {size}, it must be at least 1 and at most the maximum "
            f"context length of {max_len}, or -1 (as many as fit)",
        )
    length = max(max_len - (max_tokens or 1), 1) if size == -1 else size
    return list(tokens[-length:])
