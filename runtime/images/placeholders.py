"""Where images are in a prompt: at the tokens that the chat template wrote for them, only there.

A text that contains such a token literally stays text: it is replaced by a mark before the template
runs, and what it stands for is tokenized in two pieces, which no special token spans.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from atomc.runtime.images.image_error import ImageError
from atomc.runtime.requests.request import PromptImage


class Placeholders:
    """For one chat.

    tokens   the texts of the special tokens that stand for images and videos
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        nonce = secrets.token_hex(16)
        self._marks = {token: f"mark{nonce}number{i}end" for i, token in enumerate(tokens)}

    def hide(self, value: Any) -> Any:
        """The messages, tools or template arguments with a mark for each literal token."""
        if isinstance(value, str):
            for token, mark in self._marks.items():
                value = value.replace(token, mark)
            return value
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The rendered text with the literal tokens."""
        for token, mark in self._marks.items():
            text = text.replace(mark, token)
        return text

    def pieces(self, text: str) -> list[str]:
        """The rendered text, cut within each literal token."""
        pieces = [text]
        for token, mark in self._marks.items():
            half = len(token) // 2
            pieces = [
                piece
                for uncut in pieces
                for piece in _cut(uncut.split(mark), token[:half], token[half:])
            ]
        return pieces


def _cut(parts: list[str], before: str, after: str) -> list[str]:
    """The parts, with a token's halves at each border: at one's end and the next one's start."""
    last = len(parts) - 1
    return [
        (after if i else "") + part + (before if i < last else "") for i, part in enumerate(parts)
    ]


def check_image_tokens(tokens: Sequence[int], image_token_id: int, num_images: int) -> None:
    """Raises ImageError if the prompt has not one image token for each image."""
    count = tokens.count(image_token_id)
    if count != num_images:
        raise ImageError(
            f"the chat template wrote {count} image tokens for {num_images} images: it does not "
            "support images in these messages"
        )


def place_images(
    tokens: Sequence[int], image_token_id: int, images: Sequence[PromptImage]
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """The prompt with all tokens of each image, and the images with their positions."""
    placed: list[PromptImage] = []
    prompt: list[int] = []
    for token in tokens:
        if token != image_token_id:
            prompt.append(token)
            continue
        image = replace(images[len(placed)], start=len(prompt))
        placed.append(image)
        prompt += [token] * image.length
    return prompt, tuple(placed)
