"""Prompts of chats, offline: the chat template and the images of a model's folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atomc.files.json_file import read_json
from atomc.runtime.images.content_parts import ImageSource, has_images, split_images
from atomc.runtime.images.decode import decode_image, rgb_image
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.media_access import MediaAccess
from atomc.runtime.images.placeholders import Placeholders, check_image_tokens, place_images
from atomc.runtime.images.processor import ImageProcessor, image_tokens, load_image_processor
from atomc.runtime.requests.request import PromptImage
from atomc.runtime.text.chat_template import load_chat_template
from atomc.runtime.text.detokenizer import Tokenizer, encode

MAX_IMAGES = 4096
# The caller is the user of this process.
ACCESS = MediaAccess(any_file=True, max_bytes=2**30)


class ChatPrompts:
    """Raises ValueError for a folder without a chat template or tokenizer, and for invalid files;
    ImportError without jinja2.
    """

    def __init__(self, folder: Path, tokenizer: "Tokenizer | None") -> None:
        ids = image_tokens(folder, read_json(folder / "config.json"), tokenizer)
        images = ids if isinstance(ids, str) else load_image_processor(folder)
        template = load_chat_template(folder, keeps_parts=isinstance(images, ImageProcessor))
        if tokenizer is None or template is None:
            raise ValueError(f"{folder} has no tokenizer or chat template: use generate")
        self._image_tokens, self._images = ids, images
        self._template, self._tokenizer = template, tokenizer

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
        ids, processor = self._image_tokens, self._images
        if isinstance(processor, str) and has_images(messages):
            raise ValueError(f"this model reads no images: {processor}")
        hidden = Placeholders(() if isinstance(ids, str) else ids.texts)
        messages, sources = split_images(messages, MAX_IMAGES)
        text = self._template.render(
            hidden.hide(messages),
            hidden.hide(tools),
            add_generation_prompt=add_generation_prompt,
            **{k: v for k, v in hidden.hide(kwargs).items() if k != "add_generation_prompt"},
        )
        # Without a BOS token, which the template writes itself.
        tokens = [
            token
            for piece in hidden.pieces(text)
            for token in encode(self._tokenizer, piece, add_special_tokens=False)
        ]
        if isinstance(ids, str) or isinstance(processor, str):
            return tokens, ()
        check_image_tokens(tokens, ids.image, len(sources))
        prepared = [_prepared(processor, i, source) for i, source in enumerate(sources, 1)]
        return place_images(tokens, ids.image, prepared)


def _prepared(processor: ImageProcessor, number: int, source: ImageSource) -> PromptImage:
    try:
        if isinstance(source, str):
            return processor.prepare(decode_image(ACCESS.read(source)))
        return processor.prepare(rgb_image(source))
    except ImageError as error:
        raise ImageError(f"image {number}: {error}", error.code) from error
