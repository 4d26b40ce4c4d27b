"""The model as the front process knows it: names, tokenizer, chat template, parsers, and defaults of sampling."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atomc.runtime.detokenizer import TokenTexts, load_tokenizer
from atomc.runtime.generation_config import sampling_defaults
from atomc.runtime.server.chat import ChatTemplate, encode_chat, load_chat_template
from atomc.runtime.server.config import ServerConfig
from atomc.runtime.server.errors import APIError, invalid
from atomc.runtime.server.reasoning import REASONING_PARSERS, detect_reasoning
from atomc.runtime.server.tools import TOOL_PARSERS, detect

# A longer text is tokenized in a thread, so that nobody waits for it.
LONG_TEXT = 8192


@dataclass
class Served:
    """One model and how clients speak to it.

    names       what clients call it; the first is in answers
    defaults    of sampling, for requests that leave them out
    tools, reasoning   names of the parsers; None: this model's way is not known
    max_len, vocab_size   of the engine, once it is ready
    """

    names: tuple[str, ...]
    tokenizer: Any | None
    template: ChatTemplate | None
    defaults: Mapping[str, Any]
    tools: str | None
    reasoning: str | None
    max_len: int = 0
    vocab_size: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._texts = None if self.tokenizer is None else TokenTexts(self.tokenizer)

    def check_name(self, name: str | None) -> None:
        """Raises a 404 if clients know no model of this name; none at all means this one."""
        if name is not None and name not in self.names:
            raise APIError(404, f"the model {name!r} does not exist; there is {', '.join(self.names)}", param="model",
                           code="model_not_found")  # fmt: skip

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raises a 400 for a token that does not exist."""
        size = self.vocab_size
        if size is not None and tokens and max(tokens) >= size:
            raise invalid(f"{param}: token id {max(tokens)} is not in the vocabulary of {size} tokens", param)

    async def encoded(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a prompt. Raises a 400 if the model has no tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise invalid("this model has no tokenizer: give the prompt as token ids", "prompt")

        text.encode()  # tokenizers would call half a surrogate pair a wrong type

        def encode() -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

        return encode() if len(text) < LONG_TEXT else await asyncio.to_thread(encode)

    async def rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, **kwargs: Any
    ) -> str:
        """The conversation as the model's text. Raises a 400 with the template's words if it cannot be."""
        if self.template is None or self.tokenizer is None:
            raise invalid("this model has no chat template: use /v1/completions, or start the server with --chat-template")
        template = self.template
        try:
            return await asyncio.to_thread(template.render, messages, tools, **kwargs)
        except ValueError as error:
            raise invalid(str(error), "messages") from error

    async def encoded_chat(self, text: str) -> list[int]:
        """The tokens of a rendered conversation."""
        text.encode()
        if len(text) < LONG_TEXT:
            return encode_chat(self.tokenizer, text)
        return await asyncio.to_thread(encode_chat, self.tokenizer, text)

    def decoded(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        if self.tokenizer is None:
            raise invalid("this model has no tokenizer")
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of one token; a part of a character is U+FFFD in the text and itself in the bytes."""
        if self._texts is None:
            return f"token_id:{token_id}", []
        raw = self._texts.bytes(token_id)
        return raw.decode(errors="replace"), list(raw)


def load_served(folder: Path, name: str, config: ServerConfig) -> Served:
    """What the files of a model's folder say. Raises ValueError and FileNotFoundError for what cannot be used."""
    from atomc.json_file import read_json

    model_config = read_json(folder / "config.json")
    template = load_chat_template(folder, Path(config.chat_template) if config.chat_template else None)
    source, model_type = template.source if template else "", model_config.get("model_type")
    return Served(
        names=config.served_model_name or (name,),
        tokenizer=load_tokenizer(folder),
        template=template,
        defaults=sampling_defaults(folder) if config.generation_config == "model" else {},
        tools=_parser(config.tool_call_parser, TOOL_PARSERS, "tool_call_parser") or detect(source, model_type),
        reasoning=_reasoning(config.reasoning_parser, source, model_type),
    )


def _reasoning(chosen: str | None, source: str, model_type: str | None) -> str | None:
    if chosen == "none":
        return None
    return _parser(chosen, REASONING_PARSERS, "reasoning_parser") or detect_reasoning(source, model_type)


def _parser(chosen: str | None, known: Mapping[str, Any], what: str) -> str | None:
    if chosen is not None and chosen not in known:
        raise ValueError(f"{what} is {chosen!r}, expected one of {', '.join(known)}")
    return chosen
