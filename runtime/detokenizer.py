"""Text from tokens, as they come."""

import os
from pathlib import Path
from typing import Any

# Tokens before the new ones that are decoded with them: whether a token starts with a space depends on its neighbours.
CONTEXT_TOKENS = 5
REPLACEMENT_CHARACTER = "\ufffd"
# Tokens that wait for the rest of a character; a character has at most four bytes, so that more are no character.
MAX_HELD_TOKENS = 8


def load_tokenizer(folder: Path) -> Any | None:
    """The `tokenizers.Tokenizer` of a model folder; None if it has no tokenizer.json.

    Raises ValueError for a damaged file, and ImportError, naming the extra to install, if the library is missing.
    """
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file, or a link to none; download it again")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"{path} needs the library `tokenizers`: pip install 'atomc[hf]'") from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
        # Those of training; a prompt is tokenized as it is.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("")  # fails for special tokens that do not exist
    except BaseException as error:  # the library has no type of its own, and a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{path} is not a tokenizer that can be read: {' '.join(str(error).split())}; "
                         "download it again") from error  # fmt: skip
    return tokenizer


class Detokenizer:
    """Text of one sequence, piece by piece; the pieces together are the text whatever the tokens came with.

    A piece is held back while it ends in the middle of a character. Special tokens have no text, unless they are kept.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        # The tokens decoded together: the text of the first `shown`, `before`, is given out, that of the rest is not yet.
        self.window = prompt[-CONTEXT_TOKENS:]
        self.num_emitted = len(self.window)
        self.emitted_text = self._decode(self.window)

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete, perhaps none."""
        return "".join(self._add_token(token) for token in tokens)

    def flush(self) -> str:
        """What was held back, with U+FFFD for the half of a character; for the end."""
        return self._decode(self.window)[len(self.emitted_text) :]

    def _add_token(self, token: int) -> str:
        self.window.append(token)
        piece = self.flush()
        num_held = len(self.window) - self.num_emitted
        if not piece or (piece.endswith(REPLACEMENT_CHARACTER) and num_held < MAX_HELD_TOKENS):
            return ""
        self.window = self.window[self.num_emitted :]
        self.num_emitted = len(self.window)
        self.emitted_text = self._decode(self.window)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)
        return text


class TokenTexts:
    """What single tokens stand for, special ones included; for lists of tokens and their probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # Not of tokenizer.to_str(), which counts from 0 to the largest id.
        decoder = "" if tokenizer.decoder is None else tokenizer.decoder.__getstate__().decode()
        self._byte_of = _byte_of_character() if '"ByteLevel"' in decoder else {}
        self._fallback = '"ByteFallback"' in decoder
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items()}

    def text(self, token: int) -> str:
        """The token's text, as it is after other text; U+FFFD for each part of a character."""
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """The bytes of UTF-8 that the token stands for, also if they are only a part of a character."""
        piece: str | None = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token not in self._special:
            if self._byte_of and all(character in self._byte_of for character in piece):
                return bytes(self._byte_of[character] for character in piece)
            if self._fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes.fromhex(piece[3:5])
            piece = piece.replace("\u2581", " ")
        return piece.encode()


def _byte_of_character() -> dict[str, int]:
    """How byte-level tokens spell bytes: visible ones of Latin-1 as themselves, the others in order from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}
