"""Print the answer of a server token by token, with nothing but the standard library.

atomc serve                                                     in another terminal
python examples/stream_client.py "In the beginning"
python examples/stream_client.py --chat "Who are you?" --url http://host:8000 --key KEY
"""

import argparse
import json
import urllib.request
from collections.abc import Iterator
from typing import TypedDict


class Event(TypedDict, total=False):
    """What this program reads of an event of OpenAI's streams."""

    choices: list[dict[str, str | dict[str, str]]]
    usage: dict[str, int] | None


def events(url: str, key: str, body: dict[str, object]) -> Iterator[Event]:
    """The events of a stream; the server ends it with the line `data: [DONE]`."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            _, is_data, data = line.decode().strip().partition("data: ")
            if data == "[DONE]":
                return
            if is_data:
                yield json.loads(data)


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams one answer of a server.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--key", default="", help="an API key of the server")
    parser.add_argument("--model", default="atomc-demo")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--chat", action="store_true", help="as a message of a chat")
    flags = parser.parse_args()

    body: dict[str, object] = {
        "model": flags.model,
        "max_tokens": flags.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if flags.chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": flags.prompt}]
    else:
        path, body["prompt"] = "completions", flags.prompt
    usage: dict[str, int] = {}
    for event in events(f"{flags.url}/v1/{path}", flags.key, body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            print(text or "", end="", flush=True)
    print(f"\n{usage['completion_tokens']} tokens after {usage['prompt_tokens']} of the prompt")


if __name__ == "__main__":
    main()
