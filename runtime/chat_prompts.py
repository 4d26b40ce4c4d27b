"""Prompts of chats, offline: the chat template and the images of a model's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomc.json_file import read_json
from atomc.runtime.image_input.content_parts import ImageSource, has_images, split_images
from atomc.runtime.image_input.decode import decode_image, to_rgb
from atomc.runtime.image_input.image_error import ImageError
from atomc.runtime.image_input.media_access import MediaAccess
from atomc.runtime.image_input.placeholders import Placeholders, check_image_tokens, place_images
from atomc.runtime.image_input.processor import ImageProcessor, PreparedImage, load_image_processor
from atomc.runtime.prompt_image import PromptImage
from atomc.runtime.server.chat_template import load_chat_template

if TYPE_CHECKING:  # optional
    from tokenizers import Tokenizer

MAX_IMAGES = 4096
# The caller is the user of this process.
ACCESS = MediaAccess(any_file=True, max_bytes=2**30)


class ChatPrompts:
    """Raises ValueError for a folder without a chat template or tokenizer, and for invalid files;
    ImportError without jinja2.
    """

    def __init__(self, folder: Path, tokenizer: "Tokenizer | None") -> None:
        images = load_image_processor(folder, read_json(folder / "config.json"), tokenizer)
        template = load_chat_template(folder, keeps_parts=isinstance(images, ImageProcessor))
        if tokenizer is None or template is None:
            raise ValueError(f"{folder} has no tokenizer or chat template: use generate")
        self._images, self._template, self._tokenizer = images, template, tokenizer

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """The tokens and images of one chat. Raises ValueError for messages that the template or
        the model does not support, and for an image that cannot be used.
        """
        if isinstance(self._images, ImageProcessor):
            processor: ImageProcessor | None = self._images
            hidden = Placeholders(self._images.placeholders)
        elif has_images(messages):
            raise ValueError(f"this model reads no images: {self._images}")
        else:
            processor, hidden = None, Placeholders(())
        messages, sources = split_images(messages, MAX_IMAGES)
        text = self._template.render(
            hidden.hide(messages),
            hidden.hide(tools),
            add_generation_prompt=add_generation_prompt,
            **{k: v for k, v in hidden.hide(kwargs).items() if k != "add_generation_prompt"},
        )
        tokens = self._encode(hidden.pieces(text))
        if processor is None:
            return tokens, ()
        check_image_tokens(tokens, processor.image_token_id, len(sources))
        prepared = [_prepared(processor, i, each) for i, each in enumerate(sources, 1)]
        return place_images(tokens, processor.image_token_id, prepared)

    def _encode(self, pieces: Sequence[str]) -> list[int]:
        """Without a BOS token, which the template writes itself."""
        return [
            token
            for piece in pieces
            for token in self._tokenizer.encode(piece, add_special_tokens=False).ids
        ]


def _prepared(processor: ImageProcessor, number: int, source: ImageSource) -> PreparedImage:
    try:
        if isinstance(source, str):
            return processor.prepare(decode_image(ACCESS.read(source)))
        return processor.prepare(to_rgb(source))
    except ImageError as error:
        raise ImageError(f"image {number}: {error}", error.code) from error
