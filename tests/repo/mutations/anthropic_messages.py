"""Bugs in the translation of Anthropic's Messages API, and in its keys."""

from mutations import Bug

CHAT = "runtime/server/anthropic/chat_request.py"
KEYS = "runtime/server/http/api_keys.py"


def translated(old: str, new: str, tests: str) -> Bug:
    return Bug(CHAT, old, new, f"tests/runtime/server/protocols/test_messages.py -k '{tests}'")


BUGS = [
    translated("                parts = []\n", "", "blocks_become"),
    translated("    if parts or not blocks:\n", "    if parts:\n", "blocks_become"),
    translated("_content(texts) if texts else None", "_content(texts)", "blocks_become"),
    translated('("max_tokens", *SamplingFields.model_fields)', '("max_tokens",)', "sampling_fields"),
    translated('body.thinking.type != "disabled"', 'body.thinking.type == "enabled"', "switch"),
    Bug("runtime/server/anthropic/endpoints.py", "allow_partial=True, ", "", "tests/runtime/server/protocols/test_messages.py -k cut_are_read"),
    Bug(KEYS, " or any(number is None for number in numbers)", "", "tests/runtime/server/protocols/test_messages.py -k header_of"),
    Bug(KEYS, "len({name for name, _ in sent}) != len(sent)", "False", "tests/runtime/server/protocols/test_messages.py -k header_of"),
]  # fmt: skip
