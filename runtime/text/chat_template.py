"""Renders chat templates.

A template is a Jinja program from the checkpoint: it runs in Jinja's immutable sandbox and gets
plain JSON values only. Its functions and filters are those of transformers' `apply_chat_template`,
and the rendered text is the same.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atomc.files.json_file import read_json
from atomc.files.json_types import JSON, JSONLike, JSONObject, json_kind
from atomc.runtime.images.content_parts import IMAGE_PART
from atomc.runtime.text.json_scan import scan_json

if TYPE_CHECKING:  # optional
    from jinja2 import Environment, Template

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Keys that clients use for the reasoning; templates read the first or the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Older versions allow a sandbox escape (CVE-2025-27516).
MIN_JINJA_VERSION = (3, 1, 6)
DEFAULT, WITH_TOOLS = "default", "tool_use"
RESERVED_NAMES = ("messages", "tools", *SPECIAL_TOKENS)

Message = Mapping[str, JSONLike]


class ChatTemplate:
    """The chat template of a model, or named ones: "default", and "tool_use" for requests with
    tools.

    special_tokens   name -> text, such as bos_token; templates write them themselves
    keeps_parts      templates get the parts of a content, with {"type": "image"} for images, as
                     those of models with images expect; else the joined text

    Raises ValueError for a syntax error, and ImportError without jinja2.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        keeps_parts: bool = False,
    ) -> None:
        self.sources = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self._content = _checked_parts if keeps_parts else _joined_text
        environment = _environment()
        self._compiled = {
            name: _compile_template(environment, name, text) for name, text in self.sources.items()
        }

    @property
    def source(self) -> str:
        """The source of all templates, to detect the model's formats."""
        return "\n".join(self.sources.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, JSONLike]] | None = None,
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: JSONLike,
    ) -> str:
        """The prompt. It includes the special tokens: tokenize it without adding any.

        messages   in OpenAI's format: role, content (a string, or parts of type text), tool_calls,
                   tool_call_id, ...
        tools      in OpenAI's format: {"type": "function", "function": {...}}
        kwargs     further template variables, such as enable_thinking=False; may come from a client
        continue_final_message  end with the text of the last message, as if the model had begun it

        Raises ValueError for messages of another format, and with the template's message if it
        raises an error.
        """
        if not messages:
            raise ValueError("messages is empty, expected at least one message")
        for name in RESERVED_NAMES:
            if name in kwargs:
                raise ValueError(f"chat_template_kwargs cannot set {name!r}: the server sets it")
        name = self._name(tools)
        # "developer" is OpenAI's newer name of the system role, which most templates do not
        # support.
        roles = {} if "developer" in self.sources[name] else {"developer": "system"}
        for message in messages:
            _check_message(message, self.sources[name])
        normalized = [_message(message, roles, self._content) for message in messages]
        variables: JSONObject = {
            **self.special_tokens,
            "documents": None,
            **{name: _json_types(value) for name, value in kwargs.items()},
            "tools": _json_types(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        if not continue_final_message:
            return self._render_any(name, normalized, variables)
        end = secrets.token_hex(16)  # a text that no message has
        normalized[-1] = _append_text(normalized[-1], f"{end} ")
        text, marker, rest = self._render_any(name, normalized, variables).rpartition(end)
        if not marker:
            raise ValueError(
                "continue_final_message: the chat template does not keep the text of the last "
                "message"
            )
        # A template that strips the text strips it here too.
        return text if rest.startswith(" ") else text.rstrip()

    def _render_any(self, name: str, messages: list[JSONObject], variables: JSONObject) -> str:
        """The prompt of the messages, or of those with fewer system messages: many templates
        accept one only, at the beginning, and some accept none.
        """
        try:
            return self._render(name, messages, variables)
        except ValueError:
            roles = [message["role"] for message in messages]
            for keeps_first in [True] * ("system" in roles[1:]) + [False] * ("system" in roles):
                fewer = _fewer_system_messages(messages, keeps_first)
                with suppress(ValueError):
                    return self._render(name, fewer, variables)
            raise

    def _render(self, name: str, messages: list[JSONObject], variables: JSONObject) -> str:
        from jinja2 import TemplateError

        try:
            try:
                parsed = [_parse_calls(message) for message in messages]
                return str(self._compiled[name].render({**variables, "messages": parsed}))
            except TypeError:
                # Most templates expect tool call arguments as an object; DeepSeek's concatenates
                # them as a string.
                if not any("tool_calls" in message for message in messages):
                    raise
                return str(self._compiled[name].render({**variables, "messages": messages}))
        except TemplateError as error:
            raise ValueError(f"the chat template rejected the messages: {error}") from error
        except Exception as error:  # a template is foreign code, which can raise anything
            raise ValueError(
                f"the chat template failed on the messages: {type(error).__name__}: {error}"
            ) from error

    def _name(self, tools: Sequence[Mapping[str, JSONLike]] | None) -> str:
        if tools and WITH_TOOLS in self.sources:
            return WITH_TOOLS
        if DEFAULT in self.sources:
            return DEFAULT
        raise ValueError(
            f"the model's chat templates are {sorted(self.sources)}, expected one named "
            f"{DEFAULT!r}: set one with --chat-template"
        )


def _append_text(message: JSONObject, suffix: str) -> JSONObject:
    """With this at the end of its text. Raises ValueError for a message without one at its end."""
    content = message.get("content")
    if isinstance(content, str) and content:
        return message | {"content": content + suffix}
    last = content[-1] if isinstance(content, list) and content else None
    if isinstance(content, list) and isinstance(last, dict) and isinstance(last.get("text"), str):
        return message | {"content": [*content[:-1], last | {"text": f"{last['text']}{suffix}"}]}
    raise ValueError("continue_final_message: the last message does not end with text")


def load_chat_template(
    folder: Path, file: Path | None = None, *, keeps_parts: bool = False
) -> ChatTemplate | None:
    """The template of a model folder, or of `file` with the folder's special tokens; None if there
    is none. keeps_parts: as in ChatTemplate.

    Reads chat_template.jinja and additional_chat_templates/*.jinja, else tokenizer_config.json.
    Raises ValueError and FileNotFoundError for invalid or missing files.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    special = _special_tokens(folder, config)
    if file is not None:
        if not file.is_file():
            raise FileNotFoundError(
                f"--chat-template {file}: no such file; expected a Jinja template"
            )
        return ChatTemplate(_text(file), special, keeps_parts)
    templates = {
        path.stem: _text(path)
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (folder / "chat_template.jinja").is_file():
        templates[DEFAULT] = _text(folder / "chat_template.jinja")
    templates = templates or _templates_in(config, config_file)
    return ChatTemplate(templates, special, keeps_parts) if templates else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text ({error}), expected a Jinja template"
        ) from error


def _templates_in(config: JSONObject, file: Path) -> dict[str, str]:
    match config.get("chat_template"):
        case None:
            return {}
        case str(text):
            return {DEFAULT: text}
        case [*entries] if all(map(_named_template, entries)):
            return dict(filter(None, map(_named_template, entries)))
        case other:
            raise ValueError(
                f"{file}: chat_template is {json_kind(other)}, expected a string or a list of "
                "{name, template}, both strings"
            )


def _named_template(entry: JSON) -> tuple[str, str] | None:
    match entry:
        case {"name": str(name), "template": str(text)}:
            return name, text
    return None


def _special_tokens(folder: Path, config: JSONObject) -> dict[str, str]:
    """Special tokens by name; older checkpoints have them in special_tokens_map.json."""
    older = folder / "special_tokens_map.json"
    named = (read_json(older) if older.is_file() else {}) | {
        key: value for key, value in config.items() if value
    }
    return {name: _token_text(name, named[name]) for name in SPECIAL_TOKENS if named.get(name)}


def _token_text(name: str, value: JSON) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(
            f"tokenizer_config.json, special_tokens_map.json: {name} is {value!r:.60}, expected a "
            "string or an object with a string `content`"
        )
    return text


# Inputs of templates


def _check_message(message: Message, source: str) -> None:
    """Raises ValueError for a role that neither OpenAI nor the template's source has, and for a
    message without content, except one of the assistant, which may have tool calls instead.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {message!r:.80}, expected an object with a role")
    role = message["role"]
    if role not in ROLES and not any(f"{quote}{role}{quote}" in source for quote in "'\""):
        raise ValueError(f"a message has the role {role!r:.40}, expected {', '.join(ROLES)}")
    if message.get("content") is None and role != "assistant":
        raise ValueError(
            f"a message of role {role!r:.40} has no content, expected a string or a list of parts"
        )


def _message(
    message: Message, roles: Mapping[str, str], content: Callable[[JSON], JSON]
) -> JSONObject:
    """A message as templates expect it: without nulls, with the content that `content` returns,
    reasoning under the keys they read.
    """
    normalized = {
        str(key): _json_types(value) for key, value in message.items() if value is not None
    }
    role = str(normalized["role"])
    normalized["role"] = roles.get(role, role)
    if "content" in normalized:
        normalized["content"] = content(normalized["content"])
    elif isinstance(normalized.get("refusal"), str):
        normalized["content"] = normalized["refusal"]
    reasoning = next((normalized[key] for key in REASONING_KEYS if key in normalized), None)
    return (
        normalized
        if reasoning is None
        else {"thinking": reasoning, **normalized, "reasoning_content": reasoning}
    )


def _fewer_system_messages(messages: Sequence[JSONObject], keeps_first: bool) -> list[JSONObject]:
    """System messages as a part of the user's message before or after them. keeps_first: those at
    the beginning are joined to one instead.
    """
    result: list[JSONObject] = []
    is_moved = False  # the last one of the result comes from a system message only
    for message in messages:
        role = message["role"]
        moves = role == "system" and not (
            keeps_first and all(earlier["role"] == "system" for earlier in result)
        )
        last = result[-1] if result else None
        joins = last is not None and (
            (moves and last["role"] == "user")
            or (is_moved and role == "user")
            or (role == "system" and not moves)
        )
        if last is not None and joins:
            content = _joined_contents(last.get("content", ""), message.get("content", ""))
            result[-1] = {**last, **message, "role": last["role"], "content": content}
            is_moved &= moves
        else:
            result.append({**message, "role": "user"} if moves else message)
            is_moved = moves
    return result


def _joined_contents(first: JSON, second: JSON) -> JSON:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[JSON] = []
    for content in (first, second):
        parts += content if isinstance(content, list) else [{"type": "text", "text": content}]
    return parts


def _joined_text(content: JSON) -> str:
    """The content as one string; parts of type text are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(map(_text_of_part, _parts(content)))


def _checked_parts(content: JSON) -> JSON:
    """The content as a string, or as parts of type text and image."""
    if isinstance(content, str):
        return content
    return [
        part if part == IMAGE_PART else {"type": "text", "text": _text_of_part(part)}
        for part in _parts(content)
    ]


def _parts(content: JSON) -> list[JSON]:
    if not isinstance(content, list):
        raise ValueError(
            f"the content of a message is {json_kind(content)}, expected a string or a "
            "list of parts"
        )
    return content


def _text_of_part(part: JSON) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": kind}:
            pass
        case _:
            kind = None if isinstance(part, dict) else type(part).__name__
    raise ValueError(f"a content part of type {kind!r} is not supported, only 'text' with a string")


def _parse_calls(message: JSONObject) -> JSONObject:
    """The message with the arguments of its tool calls as objects instead of JSON text."""
    calls = message.get("tool_calls")
    return (
        {**message, "tool_calls": [_parse_arguments(call) for call in calls]}
        if isinstance(calls, list)
        else message
    )


def _parse_arguments(call: JSON) -> JSON:
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not (isinstance(call, dict) and isinstance(function, dict) and isinstance(text, str)):
        return call
    try:
        scan_json(text.encode(), 0)
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call  # not JSON, or it would take long to parse: keep the model's text
    return (
        {**call, "function": {**function, "arguments": arguments}}
        if isinstance(arguments, dict)
        else call
    )


def _json_types(value: JSONLike) -> JSON:
    """A copy of JSON types only: the template could call the methods of any other type."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {str(key): _json_types(item) for key, item in value.items()}
        case list() | tuple():
            return [_json_types(item) for item in value]
    raise ValueError(
        f"a {type(value).__name__} cannot be passed to a chat template, expected JSON values"
    )


# The Jinja environment


def _compile_template(environment: "Environment", name: str, text: str) -> "Template":
    from jinja2 import TemplateSyntaxError

    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template {name!r} is not valid Jinja: line {error.lineno}: {error}"
        ) from error
    # From compiling the Python code that Jinja generates, such as a `break` outside of a loop.
    except SyntaxError as error:
        raise ValueError(f"the chat template {name!r} is not valid Jinja: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"the chat template {name!r} is nested too deeply: {error}") from error


def _environment() -> "Environment":
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            "chat templates need the library `jinja2`: pip install 'atomc[serve]'"
        ) from error
    if (
        tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
        < MIN_JINJA_VERSION
    ):
        raise ImportError(
            f"jinja2 {jinja2.__version__} allows templates to escape the sandbox: "
            "pip install -U 'jinja2>=3.1.6'"
        )
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        """{% generation %} marks the model's text, for training; here it only opens a scope."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    class Namespace(jinja2.utils.Namespace):
        """Rejects names with a leading underscore, which give access to Python internals."""

        def __init__(
            *args: Any, **kwargs: Any
        ) -> None:  # no `self`, which a template may pass as a keyword
            for key in dict(*args[1:], **kwargs):
                _refuse_private(key)
            jinja2.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": Namespace,
    }
    return environment


def _refuse_private(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not begin with an underscore: {name!r}")


class _Dict:
    """`dict(...)` for templates, without the other attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
