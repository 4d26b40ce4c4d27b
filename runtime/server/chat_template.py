"""Chat templates: the text that a model wants for a conversation.

A template is a Jinja program that comes with the model, so it runs in Jinja's immutable sandbox and sees plain JSON
only. What it can use is what transformers gives it (`apply_chat_template`), and the text is the same.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from atomc.json_file import read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names that clients and templates use for what a model thought; a template reads the first or the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
# Before this one a template could leave the sandbox (CVE-2025-27516).
OLDEST_JINJA = (3, 1, 6)
DEFAULT, WITH_TOOLS = "default", "tool_use"
NOT_FOR_CLIENTS = ("messages", "tools", *SPECIAL_TOKENS)

Message = Mapping[str, Any]


class ChatTemplate:
    """The template of a model, or its named ones: "default", and "tool_use" for requests with tools.

    special_tokens  name -> text, such as bos_token, which templates write themselves

    Raises ValueError for a template that is not Jinja, and ImportError without jinja2.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        self.sources = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        environment = _environment()
        self._compiled = {name: _compiled(environment, name, text) for name, text in self.sources.items()}

    @property
    def source(self) -> str:
        """The text of all templates, to tell which formats the model knows."""
        return "\n".join(self.sources.values())

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None, /,
        add_generation_prompt: bool = True, **kwargs: Any,
    ) -> str:  # fmt: skip
        """The prompt. It has the special tokens written out: tokenize it without adding any.

        messages  as in OpenAI's API: role, content (a text, or parts of type text), tool_calls, tool_call_id ...
        tools     as in OpenAI's API: {"type": "function", "function": {...}}
        kwargs    more names for the template, such as enable_thinking=False; they may come from a client

        Raises ValueError if the messages are not of this form, and with the template's words if it refuses them.
        """
        if not messages:
            raise ValueError("messages is empty, expected at least one")
        for name in NOT_FOR_CLIENTS:
            if name in kwargs:
                raise ValueError(f"{name!r} cannot be set for the chat template: the server gives it")
        name = self._name(tools)
        # Most templates do not know OpenAI's newer name for the system prompt.
        roles = {} if "developer" in self.sources[name] else {"developer": "system"}
        plain = [_message(message, roles) for message in messages]
        given = self.special_tokens | {"documents": None} | _plain(kwargs)
        given |= {"tools": _plain(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        return self._rendered(name, plain, given)

    def _rendered(self, name: str, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            try:
                return str(self._compiled[name].render({**given, "messages": [_objects(message) for message in messages]}))
            except TypeError:
                # Most templates want the arguments of a call as an object; DeepSeek's joins them as a text.
                if not any("tool_calls" in message for message in messages):
                    raise
                return str(self._compiled[name].render({**given, "messages": messages}))
        except TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        except Exception as error:  # a template is a program of somebody else: it can raise anything
            raise ValueError(f"the chat template failed on the messages: {type(error).__name__}: {error}") from error

    def _name(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools and WITH_TOOLS in self.sources:
            return WITH_TOOLS
        if DEFAULT in self.sources:
            return DEFAULT
        raise ValueError(f"the model's chat templates are {sorted(self.sources)}, and none is named {DEFAULT!r}: "
                         "pass one with --chat-template")  # fmt: skip


def load_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """The template of a model folder, or that of `file` with the folder's special tokens; None if there is none.

    Looked for in chat_template.jinja with additional_chat_templates/*.jinja, then in tokenizer_config.json. Raises
    ValueError and FileNotFoundError for files that cannot be used.
    """
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    special = _special_tokens(folder, config)
    if file is not None:
        if not file.is_file():
            raise FileNotFoundError(f"--chat-template {file}: no such file; expected a Jinja template")
        return ChatTemplate(_text(file), special)
    found = {path.stem: _text(path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        found[DEFAULT] = _text(folder / "chat_template.jinja")
    found = found or _templates_in(config, config_file)
    return ChatTemplate(found, special) if found else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}), expected a Jinja template") from error


def _templates_in(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    match config.get("chat_template"):
        case None:
            return {}
        case str(text):
            return {DEFAULT: text}
        case [*entries] if all(_is_named_template(entry) for entry in entries):
            return {entry["name"]: entry["template"] for entry in entries}
        case other:
            raise ValueError(f"{file}: chat_template is a {type(other).__name__}, expected a text or a list of "
                             "{name, template}, both texts")  # fmt: skip


def _is_named_template(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; older checkpoints have them in a file of their own."""
    older = folder / "special_tokens_map.json"
    named = (read_json(older) if older.is_file() else {}) | {key: value for key, value in config.items() if value}
    return {name: _token_text(name, named[name]) for name in SPECIAL_TOKENS if named.get(name)}


def _token_text(name: str, value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"tokenizer_config.json, special_tokens_map.json: {name} is {value!r:.60}, expected a text or an "
                         "object with content, a text")  # fmt: skip
    return text


# What templates see


def _message(message: Message, roles: Mapping[str, str]) -> dict[str, Any]:
    """A message as templates expect it: no nulls, content a text, what was thought under the names they read."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is {message!r:.80}, expected an object with a role")
    plain: dict[str, Any] = _plain({key: value for key, value in message.items() if value is not None})
    plain["role"] = roles.get(plain["role"], plain["role"])
    if "content" in plain:
        plain["content"] = _content(plain["content"])
    thought = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    return plain if thought is None else {"thinking": thought, **plain, "reasoning_content": thought}


def _content(content: Any) -> str:
    """One text; parts of type text are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"the content of a message is a {type(content).__name__}, expected a text or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"a content part of type {kind!r} is not supported, only 'text' with a text")
    return "\n".join(part["text"] for part in content)


def _objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as objects, not as JSON text."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call  # as the model wrote it
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _plain(value: Any) -> Any:
    """A copy made of JSON's types only: methods of anything else would be open to the template."""
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
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
    raise ValueError(f"a {type(value).__name__} cannot be given to a chat template, expected JSON values")


# What templates can use


def _compiled(environment: Any, name: str, text: str) -> Any:
    from jinja2 import TemplateSyntaxError

    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template {name!r} is not Jinja: line {error.lineno}: {error}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:  # of Python, to which Jinja translates it
        raise ValueError(f"the chat template {name!r} is nested too deeply: {error}") from error


def _environment() -> Any:
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need the library `jinja2`: pip install 'atomc[serve]'") from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < OLDEST_JINJA:
        raise ImportError(f"jinja2 {jinja2.__version__} does not keep a template in its sandbox: "
                          "pip install -U 'jinja2>=3.1.6'")  # fmt: skip
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """{% generation %} marks what the model wrote, for training; here it is a scope and nothing else."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, behind which Python's internals are."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # without self: a template may use that name
            for key in dict(*args[1:], **kwargs):
                _refuse_private(key)
            jinja2.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now,
                            "dict": _Dict(), "namespace": Namespace}  # fmt: skip
    return environment


def _refuse_private(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name on a namespace may not begin with an underscore: {name!r}")


class _Dict:
    """`dict(...)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON as it is; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
