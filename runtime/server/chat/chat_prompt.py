"""The prompt of a chat: rendered by the chat template, tokenized, with its images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from starlette.requests import Request

from atomc.files.json_types import JSONLike
from atomc.runtime.images.content_parts import has_images, split_images
from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.placeholders import Placeholders, check_image_tokens, place_images
from atomc.runtime.requests.request import PromptImage
from atomc.runtime.server.http.limits import MESSAGES, check_length
from atomc.runtime.server.http.responses import cancel_on_disconnect, invalid
from atomc.runtime.server.service.image_budget import image_reservation
from atomc.runtime.server.service.image_reader import ImageReader, RequestLimits
from atomc.runtime.server.service.model_info import ChatInput, Tools
from atomc.runtime.server.service.protocol import ChatRequest, TokenizeRequest
from atomc.runtime.server.service.service import Service


@dataclass(frozen=True)
class ChatPrompt:
    """text: as rendered, with one image token per image."""

    text: str
    tokens: list[int]
    images: tuple[PromptImage, ...] = ()


async def chat_prompt(
    service: Service,
    request: Request,
    body: ChatRequest | TokenizeRequest,
    tools: Tools,
    kwargs: Mapping[str, JSONLike],
    limit: int | None = None,
) -> ChatPrompt:
    """tools, kwargs: as in ChatInput. limit: maximum number of tokens of the text; None: max_len.

    Raises a 400 for messages that the template or the model does not support, and for an image
    that cannot be used.
    """
    model = service.model
    chat = ChatInput(
        body.messages or (), tools, body.add_generation_prompt, kwargs, body.continue_final_message
    )
    check_length(MESSAGES, chat.messages, "messages", "messages")
    if service.images is not None:
        try:
            return await _image_prompt(service, service.images, request, chat, limit)
        except ImageError as error:
            raise invalid(str(error), "messages", error.code) from error
    if has_images(chat.messages):
        raise invalid(f"this model reads no images: {model.no_images}", "messages")
    text = await model.render_chat(chat)
    return ChatPrompt(text, await model.encode_chat([text], limit))


async def _image_prompt(
    service: Service, reader: ImageReader, request: Request, chat: ChatInput, limit: int | None
) -> ChatPrompt:
    """The prompt of a model that reads images."""
    model, image_tokens = service.model, reader.decoder.tokens
    messages, sources = split_images(chat.messages, service.config.limit_images)
    hidden = Placeholders(image_tokens.texts)
    rendered = replace(
        chat,
        messages=hidden.hide(messages),
        tools=hidden.hide(chat.tools),
        kwargs=hidden.hide(chat.kwargs),
    )
    text = await model.render_chat(rendered)
    tokens = await model.encode_chat(hidden.pieces(text), limit)
    check_image_tokens(tokens, image_tokens.image, len(sources))
    text = hidden.restore(text)
    if not sources:
        return ChatPrompt(text, tokens)
    limits = RequestLimits(
        model.max_len,
        model.max_len - len(tokens),
        service.config.max_body_bytes,
        image_reservation(request),
    )
    images = await cancel_on_disconnect(request, reader.prepare(sources, limits))
    prompt, placed = place_images(tokens, image_tokens.image, images)
    return ChatPrompt(text, prompt, placed)
