"""Text from tokens, as they come."""

from pathlib import Path
from typing import Any

# Tokens before the new ones that are decoded with them: whether a token starts with a space depends on its neighbours.
CONTEXT = 5
INCOMPLETE = "\ufffd"


def load_tokenizer(folder: Path) -> Any | None:
    """The `tokenizers.Tokenizer` of a model folder; None if it has no tokenizer.json.

    Raises ImportError, naming the extra to install, if the library is missing.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ImportError(f"{path} needs the library `tokenizers`: pip install 'atomc[hf]'") from error
    return Tokenizer.from_file(str(path))


class Detokenizer:
    """Text of one sequence, piece by piece; the pieces together are the text whatever the tokens came with.

    A piece is held back while it ends in the middle of a character. Special tokens have no text.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokenizer = tokenizer
        # The tokens decoded together: the text of the first `shown` is given out, that of the rest is not yet.
        self.window = prompt[-CONTEXT:]
        self.shown = len(self.window)

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens complete, perhaps none."""
        return "".join(self._added(token) for token in tokens)

    def flush(self) -> str:
        """What was held back, with U+FFFD for the half of a character; for the end."""
        return self._rest()

    def _added(self, token: int) -> str:
        self.window.append(token)
        piece = self._rest()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        self.window = self.window[self.shown :]
        self.shown = len(self.window)
        return piece

    def _rest(self) -> str:
        before = self._decoded(self.window[: self.shown])
        return self._decoded(self.window)[len(before) :]

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
