"""Finds the images in the content parts of chat messages."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from atomc.runtime.images.image_error import ImageError

if TYPE_CHECKING:  # optional
    from PIL.Image import Image

# A URL, or, offline, a path or a decoded image.
ImageSource: TypeAlias = "str | Image"
# As chat templates know an image.
IMAGE_PART = {"type": "image"}
# The type of a part -> the key of its image. OpenAI's chat and Responses API, transformers.
IMAGE_KINDS = {"image_url": "image_url", "input_image": "image_url", "image": "image"}
VIDEO = "video"
DETAILS = (None, "auto", "low", "high")


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has an image or a video."""
    return any(_is_image(part) for message in messages for part in _parts(message))


def split_images(
    messages: Sequence[Mapping[str, Any]], limit: int
) -> tuple[list[Mapping[str, Any]], list[ImageSource]]:
    """The messages with {"type": "image"} in place of each image, and the images in this order.

    A video is its frames: one image each. Raises ImageError for a part of another form and for more
    than `limit` images.
    """
    sources: list[ImageSource] = []
    replaced = [_split_message(message, sources) for message in messages]
    if len(sources) > limit:
        raise ImageError(f"the messages have {len(sources)} images, at most {limit} are allowed")
    return replaced, sources


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and (kind in IMAGE_KINDS or kind == VIDEO)


def _split_message(message: Mapping[str, Any], sources: list[ImageSource]) -> Mapping[str, Any]:
    parts = _parts(message)
    if not any(map(_is_image, parts)):
        return message
    content: list[Any] = []
    for part in parts:
        images = _sources(part) if _is_image(part) else None
        content += [part] if images is None else [IMAGE_PART] * len(images)
        sources += images or ()
    return {**message, "content": content}


def _sources(part: Mapping[str, Any]) -> Sequence[ImageSource]:
    kind = part["type"]
    key = VIDEO if kind == VIDEO else IMAGE_KINDS[kind]
    if unknown := part.keys() - {"type", key, "detail"}:
        raise ImageError(f"a part of type {kind!r} has the field {min(map(str, unknown))!r:.40}")
    value = part.get(key)
    if kind != VIDEO:
        return [_source(value, part, kind)]
    if not isinstance(value, list | tuple) or not value:
        raise ImageError("a part of type 'video' has no list of frames, which are URLs of images")
    return [_source(frame, part, kind) for frame in value]


def _source(value: Any, part: Mapping[str, Any], kind: str) -> ImageSource:
    detail = part.get("detail")
    if isinstance(value, Mapping):
        if unknown := value.keys() - {"url", "detail"}:
            raise ImageError(f"{kind} has the field {min(map(str, unknown))!r:.40}, expected url")
        detail, value = value.get("detail"), value.get("url")
    if detail not in DETAILS:
        raise ImageError(f"detail is {detail!r:.40}, expected 'auto', 'low' or 'high'")
    if isinstance(value, str) or _is_pil(value):
        source: ImageSource = value
        return source
    raise ImageError(
        f"a part of type {kind!r} has no URL of an image, expected for example "
        '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'
    )


def _is_pil(value: Any) -> bool:
    # Without importing Pillow: an image of it cannot exist before that.
    return any(
        base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__
    )
