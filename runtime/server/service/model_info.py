"""What the frontend knows of the model: names, tokenizer, chat template, parsers, defaults."""

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from atomc.files.json_types import JSONLike
from atomc.runtime.constrained.reasoning_budget import tag_tokens
from atomc.runtime.images.image_decoder import ImageDecoder, start_image_decoder
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.http.limits import TOOLS, check_length
from atomc.runtime.server.http.responses import APIError, invalid
from atomc.runtime.server.parsers.reasoning_parsers import detect_reasoning_parser
from atomc.runtime.server.parsers.tool_parsers import detect_tool_parser
from atomc.runtime.text.chat_template import ChatTemplate, Message, load_chat_template
from atomc.runtime.text.detokenizer import Tokenizer, TokenTexts, decode, encode, load_tokenizer
from atomc.runtime.text.generation_config import sampling_defaults

# Longer texts are tokenized in a thread, to keep the event loop free.
LONG_TEXT = 1024
# Long texts are first counted in pieces of this many characters; cutting a text adds at most this
# many tokens per piece.
PIECE_CHARACTERS, EXTRA_TOKENS = 2**16, 64
RENDER_SECONDS = 10.0
T = TypeVar("T")
Tools = Sequence[Mapping[str, JSONLike]] | None


@dataclass(frozen=True)
class ChatInput:
    """What a chat template renders. kwargs: its variables that the client sets."""

    messages: Sequence[Message]
    tools: Tools
    add_generation_prompt: bool
    kwargs: Mapping[str, JSONLike]
    continue_final_message: bool = False


@dataclass
class ModelInfo:
    """The served model.

    names              names for clients; responses have the first
    defaults           sampling parameters of requests that do not set them
    tools, reasoning   names of the parsers; None: the model's format is unknown
    images             decodes images; None: the model reads none, for the reason no_images
    adapters           LoRA adapters, whose names clients use as the model's; name -> folder
    max_len            maximum sequence length in tokens; with vocab_size, set when the engine is
                       ready
    """

    names: tuple[str, ...]
    tokenizer: "Tokenizer | None"
    template: ChatTemplate | None
    defaults: Mapping[str, Any]
    tools: str | None
    reasoning: str | None
    images: ImageDecoder | None = None
    no_images: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    max_len: int = 0
    vocab_size: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._texts = None if self.tokenizer is None else TokenTexts(self.tokenizer)
        added = {} if self.tokenizer is None else self.tokenizer.get_added_tokens_decoder()
        self._special_ids = {token_id for token_id, token in added.items() if token.special}

    def check_name(self, name: str | None) -> None:
        """Raises a 404 for a name other than None, this model's and its adapters'."""
        if name is not None and name not in self.names and name not in self.adapters:
            expected = ", ".join([*self.names, *self.adapters])
            raise APIError(
                404,
                f"the model {name!r} does not exist, expected {expected}",
                param="model",
                code="model_not_found",
            )

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that this name of a request stands for; None: the model as it is."""
        return name if name in self.adapters and name not in self.names else None

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises a 400 for a token id outside of the vocabulary."""
        size = self.vocab_size
        if size is not None and tokens and max(tokens) >= size:
            raise invalid(
                f"{param}: token id {max(tokens)} is not in the vocabulary of {size} tokens", param
            )

    async def encode(
        self,
        texts: Sequence[str],
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        limit: int | None = None,
    ) -> list[list[int]]:
        """The tokens of each text. Raises a 400 for a text of more than `limit` tokens (None:
        max_len), and if the model has no tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer: send token ids", param)
        limit = self.max_len if limit is None else limit

        def work() -> list[list[int]]:
            return [self._ids(text, add_special_tokens, limit, param) for text in texts]

        return work() if sum(map(len, texts)) < LONG_TEXT else await asyncio.to_thread(work)

    def _ids(self, text: str, add_special_tokens: bool, limit: int, param: str) -> list[int]:
        """The tokens of one text."""
        assert self.tokenizer is not None
        if len(text) > PIECE_CHARACTERS:
            # Count in pieces, to stop early in a text that is far too long.
            least = 0
            for start in range(0, len(text), PIECE_CHARACTERS):
                piece = text[start : start + PIECE_CHARACTERS]
                tokens = encode(self.tokenizer, piece, add_special_tokens=False)
                least += max(len(tokens) - EXTRA_TOKENS, 0)
                if least > limit:
                    raise context_length_error(limit, f"at least {least}", param)
        return encode(self.tokenizer, text, add_special_tokens=add_special_tokens)

    async def render_chat(self, chat: ChatInput) -> str:
        """The prompt that the chat template renders. Raises a 400 with the template's error message
        if it fails.
        """
        if self.template is None or self.tokenizer is None:
            raise invalid(
                "this model has no chat template: use /v1/completions or start the server with "
                "--chat-template"
            )
        template = self.template
        check_length(TOOLS, chat.tools, "tools", "tools")

        def render() -> str:
            set_here = ("add_generation_prompt", "continue_final_message")
            variables = {k: v for k, v in chat.kwargs.items() if k not in set_here}
            return template.render(
                chat.messages,
                chat.tools,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **variables,
            )

        try:
            return await asyncio.to_thread(_run_with_timeout, RENDER_SECONDS, render)
        except TimeoutError as error:
            raise invalid(
                f"rendering the chat template exceeded the limit of {RENDER_SECONDS:.0f} s",
                "messages",
            ) from error
        except ValueError as error:
            raise invalid(str(error), "messages") from error

    async def encode_chat(self, pieces: Sequence[str], limit: int | None = None) -> list[int]:
        """The tokens of the pieces of a rendered chat; adds no BOS, which the template writes
        itself. limit: as in `encode`, of each piece.
        """
        encoded = await self.encode(pieces, add_special_tokens=False, param="messages", limit=limit)
        return list(chain.from_iterable(encoded))

    async def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer")

        work = partial(decode, tokenizer, tokens, skip_special_tokens=skip_special_tokens)
        return work() if len(tokens) < LONG_TEXT else await asyncio.to_thread(work)

    @property
    def limits_reasoning(self) -> bool:
        """Whether requests can have a thinking_token_budget."""
        return tag_tokens(self.tokenizer) is not None

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves the token out of the text."""
        return token_id in self._special_ids

    def token_text_and_bytes(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of one token; an incomplete character is U+FFFD in the text."""
        if self._texts is None:
            return f"token_id:{token_id}", []
        raw = self._texts.bytes(token_id)
        return raw.decode(errors="replace"), list(raw)


def _run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in this thread. Raises TimeoutError inside of it after
    `seconds`.

    This interrupts Python code, such as a looping template; a call into C only at its end.
    """
    lock = threading.Lock()
    done = False
    timed_out = False
    thread = threading.get_ident()

    def interrupt() -> None:
        nonlocal timed_out
        with lock:
            if not done:
                timed_out = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TimeoutError)
                )

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            return work()
        finally:
            with lock:
                done = True
    except Exception as error:
        # `work` may have caught the TimeoutError and raised another error.
        if timed_out:
            raise TimeoutError(f"exceeded the limit of {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def context_length_error(limit: int, length: str, param: str) -> APIError:
    return invalid(
        f"this model's maximum context length is {limit} tokens, and {param} has {length}: "
        "shorten it",
        param,
        "context_length_exceeded",
    )


def load_model_info(
    folder: Path, name: str, config: ServerConfig, adapters: Mapping[str, str] | None = None
) -> ModelInfo:
    """Reads a model's folder. adapters: its LoRA adapters by name. Raises ValueError and
    FileNotFoundError for invalid or missing files, and for an adapter with the name of the model.
    """
    from atomc.files.json_file import read_config

    model_config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    images = start_image_decoder(folder, model_config, tokenizer)
    template = load_chat_template(
        folder,
        Path(config.chat_template) if config.chat_template else None,
        keeps_parts=isinstance(images, ImageDecoder),
    )
    source, model_type = template.source if template else "", model_config.get("model_type")
    names = config.served_model_name or (name,)
    for adapter in adapters or {}:
        if adapter in names:
            raise ValueError(f"lora: {adapter!r} is the name of the model, choose another one")
    return ModelInfo(
        names=names,
        tokenizer=tokenizer,
        template=template,
        defaults=sampling_defaults(folder) if config.generation_config == "model" else {},
        tools=config.tool_call_parser or detect_tool_parser(source, model_type),
        reasoning=None
        if config.reasoning_parser == "none"
        else config.reasoning_parser or detect_reasoning_parser(source, model_type),
        images=images if isinstance(images, ImageDecoder) else None,
        no_images=images if isinstance(images, str) else "",
        adapters=dict(adapters or {}),
    )
