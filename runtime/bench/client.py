"""One request to an OpenAI-compatible server, streamed and timed."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from atomc.files.json_types import JSONLike, JSONObject
from atomc.runtime.bench.datasets import SampleRequest
from atomc.runtime.bench.http_client import ConnectionFailed, request
from atomc.runtime.bench.metrics import RequestTiming

DATA, DONE = b"data:", b"[DONE]"
MAX_ERROR_CHARACTERS = 200
# Fields of a chat delta that have new tokens.
NEW_TOKENS = ("content", "reasoning_content", "reasoning", "tool_calls")


@dataclass(frozen=True)
class Server:
    """A server to benchmark, and the settings of every request.

    url     with or without a trailing /v1
    extra   further fields of every body, such as temperature
    """

    url: str
    model: str
    key: str | None = None
    extra: Mapping[str, JSONLike] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def address(self, path: str) -> str:
        return f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}"

    async def send(self, sample: SampleRequest, began: float) -> RequestTiming:
        """Send one request; returns its timing, relative to `began` (time.perf_counter). A failure
        is `timing.error`.
        """
        path, prompt = (
            ("chat/completions", "messages") if sample.is_chat else ("completions", "prompt")
        )
        body = {
            "model": self.model,
            prompt: sample.prompt,
            "max_tokens": sample.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            **self.headers(),
        }
        timing = RequestTiming(time.perf_counter() - began)
        try:
            async with request(
                "POST", self.address(path), headers, json.dumps(body).encode()
            ) as response:
                if response.status == 200:
                    await _read(response.lines(), timing, began)
                else:
                    timing.error = f"status {response.status}: {_message(await response.body())}"
        except (ConnectionFailed, ValueError) as error:
            timing.error = str(error)
        timing.end = time.perf_counter() - began
        return timing


async def first_model(url: str, key: str | None) -> str:
    """The name of the first model in the server's list. Raises ValueError if the server does not
    respond.
    """
    server = Server(url, "", key)
    try:
        async with request("GET", server.address("models"), server.headers()) as response:
            body = await response.body()
    except ConnectionFailed as error:
        raise ValueError(
            f"cannot connect to {url}: {error}; start `atomc serve` or set --base-url"
        ) from error
    if response.status != 200:
        raise ValueError(
            f"{server.address('models')}: status {response.status}: {_message(body)}; set --model"
            + (" and --api-key" if response.status == 401 else "")
        )
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{server.address('models')} lists no model: set --model") from error


async def _read(lines: AsyncIterator[bytes], timing: RequestTiming, began: float) -> None:
    """Record the chunks of a streamed response in `timing`."""
    async for line in lines:
        if not line.startswith(DATA):
            continue
        now = time.perf_counter() - began
        data = line[len(DATA) :].strip()
        if data == DONE:
            timing.output_tokens = timing.output_tokens or len(timing.times)
            return
        event = json.loads(data)
        if "error" in event:
            timing.error = _message(data)
            return
        if any(_has_token(choice) for choice in event.get("choices") or ()):
            timing.times.append(now)
        if usage := event.get("usage"):
            timing.input_tokens = usage.get("prompt_tokens", 0)
            timing.output_tokens = usage.get("completion_tokens", 0)
    timing.error = "the response ended before [DONE]"


def _has_token(choice: JSONObject) -> bool:
    """Whether this chunk has text; the first chunk of a chat has a role only."""
    delta = choice.get("delta")
    return bool(choice.get("text")) or (isinstance(delta, dict) and any(map(delta.get, NEW_TOKENS)))


def _message(body: bytes) -> str:
    """The message of an error response, shortened, as one line."""
    try:
        error = json.loads(body)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, LookupError, TypeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:MAX_ERROR_CHARACTERS]
