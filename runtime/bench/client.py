"""One request to an OpenAI-compatible server, streamed and timed."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atomc.runtime.bench.connection import Broken, request
from atomc.runtime.bench.figures import Timed
from atomc.runtime.bench.prompts import Ask

DATA, DONE = b"data:", b"[DONE]"
LONGEST_ERROR = 200


@dataclass(frozen=True)
class Server:
    """Where to ask, and what goes into every request.

    url     with or without /v1 at the end
    extra   further fields of each body, such as temperature
    """

    url: str
    model: str
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def address(self, path: str) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    async def send(self, ask: Ask, began: float) -> Timed:
        """The times of one request, in seconds since `began` (of time.perf_counter). Never raises for a failed one."""
        path, prompt = ("chat/completions", "messages") if ask.is_chat else ("completions", "prompt")
        body = {"model": self.model, prompt: ask.prompt, "max_tokens": ask.max_tokens, "stream": True,
                "stream_options": {"include_usage": True}, **self.extra}  # fmt: skip
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **self.headers()}
        timed = Timed(time.perf_counter() - began)
        try:
            async with request("POST", self.address(path), headers, json.dumps(body).encode()) as response:
                if response.status == 200:
                    await _read(response.lines(), timed, began)
                else:
                    timed.error = f"status {response.status}: {_message(await response.body())}"
        except (Broken, ValueError) as error:
            timed.error = str(error)
        timed.end = time.perf_counter() - began
        return timed


async def first_model(url: str, key: str | None) -> str:
    """The name of the first model that the server has. Raises ValueError if it cannot be asked."""
    server = Server(url, "", key)
    try:
        async with request("GET", server.address("models"), server.headers()) as response:
            body = await response.body()
    except Broken as error:
        raise ValueError(f"no server answers at {url}: {error}; start `atomc serve`, or give --base-url") from error
    if response.status != 200:
        raise ValueError(f"{server.address('models')}: status {response.status}: {_message(body)}; give --model"
                         + (" and --api-key" if response.status == 401 else ""))  # fmt: skip
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{server.address('models')} lists no model: give --model") from error


async def _read(lines: Any, timed: Timed, began: float) -> None:
    """Fill in the times of a streamed answer."""
    async for line in lines:
        if not line.startswith(DATA):
            continue
        now = time.perf_counter() - began
        data = line[len(DATA) :].strip()
        if data == DONE:
            timed.output_tokens = timed.output_tokens or len(timed.times)
            return
        event = json.loads(data)
        if "error" in event:
            timed.error = _message(data)
            return
        if any(_says(choice) for choice in event.get("choices") or ()):
            timed.times.append(now)
        if usage := event.get("usage"):
            timed.input_tokens, timed.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    timed.error = "the answer ended before it was whole"


def _says(choice: dict[str, Any]) -> bool:
    """Whether there is a token in this part of an answer; the first part of a chat has a role only."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
                or delta.get("tool_calls"))  # fmt: skip


def _message(body: bytes) -> str:
    """What an error's body says, in one short line."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:LONGEST_ERROR]
