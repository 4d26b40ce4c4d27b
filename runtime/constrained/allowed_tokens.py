"""The tokens that a request may sample because of allowed_token_ids and bad_words.

W = ceil(vocab_size / 32) words of a mask.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.text.detokenizer import Tokenizer, encode

BadWord = str | tuple[int, ...]


def bad_word_tokens(
    words: Iterable[BadWord], tokenizer: "Tokenizer | None"
) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word; of a text with and without a space before it. Raises ValueError
    for a text without a tokenizer, and for text that is not valid Unicode.
    """
    listed = list(words)
    tokenized = [word for word in listed if not isinstance(word, str)]
    texts = [word.lstrip() for word in listed if isinstance(word, str)]
    if texts and tokenizer is None:
        raise ValueError(
            f"bad_words has the text {texts[0][:40]!r}, but the model has no tokenizer: pass lists "
            "of token ids"
        )
    if texts and tokenizer is not None:
        spelled = (prefix + text for text in texts for prefix in ("", " "))
        ids = (encode(tokenizer, text, add_special_tokens=False) for text in spelled)
        tokenized += [tuple(tokens) for tokens in ids if tokens]
    return tuple(dict.fromkeys(tokenized))


class AllowedTokens:
    """The allowed tokens of one or several requests with the same parameters.

    depends_on_output   whether they depend on the tokens before, as for bad words of several tokens

    Raises ValueError as bad_word_tokens does, and if no token is left.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, tokenizer: "Tokenizer | None"
    ) -> None:
        allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
        if params.allowed_token_ids is None:
            allowed[:vocab_size] = True
        else:
            allowed[np.array(params.allowed_token_ids)] = True
        # The last tokens of bad words, by the tokens before them.
        self._last: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for *before, last in bad_word_tokens(params.bad_words, tokenizer):
            if last < vocab_size:
                self._last[tuple(before)].append(last)
        allowed[self._last.pop((), [])] = False
        if not allowed.any():
            raise ValueError(
                f"{' and '.join(name for name in params.constraints if '_' in name)} exclude all "
                f"{vocab_size} tokens of the vocabulary: allow more of them"
            )
        self._words = np.packbits(allowed, bitorder="little").view(np.uint32)
        self._lengths = sorted({len(before) for before in self._last})
        self.depends_on_output = bool(self._last)

    def exclude(
        self, mask: npt.NDArray[np.uint32], output: Sequence[int], draft: Sequence[int]
    ) -> None:
        """Clear the bits of the other tokens in mask [rows, W or more], one row after `output` and
        one after each token of the draft.

        output   the last `num_context` tokens of the output, or all if it has fewer
        """
        mask[:, : len(self._words)] &= self._words
        for row, words in enumerate(mask if self._last else ()):
            tokens = (*output, *draft[:row])
            for length in self._lengths:
                if length > len(tokens):
                    break
                for token in self._last.get(tokens[-length:], ()):
                    words[token // 32] &= ~np.uint32(1 << token % 32)

    @property
    def num_context(self) -> int:
        """How many tokens of the output `exclude` reads at most."""
        return max(self._lengths, default=0)
