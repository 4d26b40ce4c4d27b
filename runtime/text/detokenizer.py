"""Incremental detokenization."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

from atomc.errors import first_line
from atomc.runtime.requests.request_errors import TokenizerError
from atomc.torch_compat.exceptions import is_failure

if TYPE_CHECKING:  # optional
    import tokenizers

Tokenizer: TypeAlias = "tokenizers.Tokenizer"

# Tokens decoded before the new ones: a token's leading space depends on the tokens before it.
CONTEXT_TOKENS = 5
# The text of byte-level tokens is that of each of them, apart from characters of several tokens.
BYTE_LEVEL = b'{"type":"ByteLevel"'
REPLACEMENT_CHARACTER = "\ufffd"
# Maximum number of tokens to hold back for an incomplete character; longer sequences are not a
# character.
MAX_HELD_TOKENS = 8
P = ParamSpec("P")
T = TypeVar("T")


def load_tokenizer(folder: Path) -> "Tokenizer | None":
    """The `tokenizers.Tokenizer` of a model folder; None if it has no tokenizer.json.

    Raises ValueError for a damaged file, and ImportError, naming the extra to install, if the
    library is missing.
    """
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file or a link to one; download it again")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(
            f"{path} needs the library `tokenizers`: pip install 'atomc[hf]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
        # These settings are for training; do not pad or truncate prompts.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("")  # fails for special tokens that do not exist
    # The library raises plain Exceptions.
    except BaseException as error:  # a panic in Rust is no Exception
        if not is_failure(error):
            raise
        raise ValueError(
            f"{path} is not a valid tokenizer: {' '.join(str(error).split())}; download it again"
        ) from error
    return tokenizer


def encode(tokenizer: "Tokenizer", text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text; other threads can run meanwhile. Raises UnicodeError for a lone
    surrogate, and TokenizerError if the tokenizer fails.
    """
    text.encode()  # the library raises a TypeError for a lone surrogate
    encode_batch = tokenizer.encode_batch_fast  # unlike `encode`, it releases the GIL
    (encoding,) = _run(encode_batch, [text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def decode(
    tokenizer: "Tokenizer", tokens: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """The text of tokens; other threads can run meanwhile. Raises TokenizerError if that fails."""
    decode_batch = tokenizer.decode_batch  # unlike `decode`, it releases the GIL
    return str(_run(decode_batch, [list(tokens)], skip_special_tokens=skip_special_tokens)[0])


def _run(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return work(*args, **kwargs)
    # The library raises plain Exceptions, such as for the unknown token of a model without one.
    except BaseException as error:  # a panic in Rust is no Exception
        if not is_failure(error):
            raise
        raise TokenizerError(
            f"the model's tokenizer failed: {first_line(error)}; is tokenizer.json damaged?"
        ) from error


class Detokenizer:
    """Decodes one sequence incrementally. The concatenated pieces do not depend on how the tokens
    are split into calls.

    Text that ends in an incomplete character is held back.
    """

    def __init__(
        self, tokenizer: "Tokenizer", prompt: list[int], *, skip_special_tokens: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        self._needs_context = not decoder.startswith(BYTE_LEVEL)
        # The tokens to decode together. The text of the first num_emitted ones, emitted_text, has
        # been returned.
        self.window = prompt[-CONTEXT_TOKENS:]
        self.num_emitted = len(self.window)
        self.emitted_text = self._decode(self.window)

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        return "".join(map(self._add_token, tokens))

    def flush(self) -> str:
        """The text held back at the end of a sequence, U+FFFD for an incomplete character."""
        return self._decode(self.window)[len(self.emitted_text) :]

    def _add_token(self, token: int) -> str:
        self.window.append(token)
        piece = self.flush()
        num_held = len(self.window) - self.num_emitted
        if not piece or (piece.endswith(REPLACEMENT_CHARACTER) and num_held < MAX_HELD_TOKENS):
            return ""
        if self._needs_context or REPLACEMENT_CHARACTER in piece:
            self.window = self.window[self.num_emitted :]
            self.num_emitted = len(self.window)
            self.emitted_text = self._decode(self.window)
        else:
            self.window, self.num_emitted, self.emitted_text = [], 0, ""
        return piece

    def _decode(self, tokens: list[int]) -> str:
        work = self.tokenizer.decode
        text: str = _run(work, tokens, skip_special_tokens=self.skip_special_tokens)
        return text


class TokenTexts:
    """The bytes of single tokens, also special ones, such as for log-probabilities."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.tokenizer = tokenizer
        # Not from tokenizer.to_str(), which iterates over all ids up to the largest.
        decoder = "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()
        self._byte_of = _byte_of_character() if '"ByteLevel"' in decoder else {}
        self._fallback = '"ByteFallback"' in decoder
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items()}

    def bytes(self, token: int) -> bytes:
        """The token's UTF-8 bytes, which may be an incomplete character."""
        piece: str | None = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token not in self._special:
            if self._byte_of and all(character in self._byte_of for character in piece):
                return bytes(self._byte_of[character] for character in piece)
            if (
                self._fallback
                and len(piece) == 6
                and piece.startswith("<0x")
                and piece.endswith(">")
            ):
                return bytes.fromhex(piece[3:5])
            piece = piece.replace("\u2581", " ")
        return piece.encode()

    def vocabulary_text(self, content: str) -> str:
        """How a vocabulary spells a token with this text."""
        if not self._byte_of:
            return content.replace(" ", "\u2581")
        character_of = {byte: character for character, byte in self._byte_of.items()}
        return "".join(character_of[byte] for byte in content.encode())


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 bytes stay, others begin at U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + i): byte for i, byte in enumerate(hidden)
    }
