"""Settings of the HTTP server; the flags of `atomc serve` are these and those of EngineConfig."""

import math
from dataclasses import dataclass
from typing import Literal

from atomc.runtime.config import DEVICES, LORA
from atomc.runtime.config_fields import FlagGroup, check_values
from atomc.runtime.server.http.api_keys import check_key
from atomc.runtime.server.parsers.reasoning_parsers import REASONING_PARSERS
from atomc.runtime.server.parsers.tool_parsers import TOOL_PARSERS

SERVER, CHAT, SECURITY = FlagGroup("server"), FlagGroup("chat"), FlagGroup("security")
IMAGES = FlagGroup("images")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of one HTTP server. Field metadata: help text and group of the flag. Raises
    ValueError for wrong values.
    """

    host: str = SERVER.option(
        "127.0.0.1", "the address to listen on; 0.0.0.0 accepts connections from other machines"
    )
    port: int = SERVER.option(8000, "the port to listen on; 0: any free port")
    served_model_name: tuple[str, ...] = SERVER.option(
        (),
        "the model's name for clients; may be given several times, responses "
        "have the first; default: the directory's or the hub's name",
    )
    generation_config: Literal["model", "none"] = SERVER.option(
        "model", "the source of sampling defaults: the model's generation_config.json, or none"
    )
    max_logprobs: int = SERVER.option(20, "maximum number of logprobs of a request", least=0)
    response_store_bytes: int = SERVER.option(
        64 * 2**20,
        "maximum size of the responses that /v1/responses keeps in memory; 0: none are kept",
        least=0,
    )
    drain_seconds: float | None = SERVER.option(
        None,
        "seconds for running requests to finish at shutdown; default: 30, or 20 as a process of "
        "torchrun, which kills it 30 seconds after SIGTERM",
    )
    engine_patience: float = SERVER.option(
        60.0, "seconds without a response of the engine after which /health fails", least=1
    )
    engine_timeout: float = SERVER.option(
        600.0, "seconds without a response after which the engine is killed; 0: never", least=0
    )
    restart_engine: int = SERVER.option(
        0,
        "maximum number of restarts in a row after the engine died, with growing "
        "pauses; after that, and with 0, the server exits",
        least=0,
    )
    ray: bool = DEVICES.option(
        False,
        "run the engines and their ranks as actors of the Ray cluster of RAY_ADDRESS, or of this "
        "host: one GPU each",
    )
    header_timeout: float = SERVER.option(
        10.0, "seconds for a connection to send the headers of a request"
    )
    body_timeout: float = SERVER.option(
        30.0, "seconds for a request to send its body, plus one for every 10 kB of it"
    )
    log_requests: bool = SERVER.option(True, "log one line per finished request")
    otlp_traces_endpoint: str | None = SERVER.option(
        None,
        "send an OpenTelemetry span per request to this collector, such as "
        "http://localhost:4318/v1/traces (OTLP over HTTP)",
    )
    profile_dir: str | None = SERVER.option(
        None, "enables /start_profile and /stop_profile, which write to this directory"
    )
    chat_template: str | None = CHAT.option(
        None, "a file with a Jinja template that replaces the model's"
    )
    tool_call_parser: str | None = CHAT.option(
        None,
        "the format of tool calls, by the name here or in vLLM (docs/tools.md); default: detected "
        "from the chat template",
        TOOL_PARSERS,
    )
    reasoning_parser: str | None = CHAT.option(
        None,
        "the format of reasoning: think (also qwen3, deepseek-r1) or gpt-oss; "
        "none: part of the content; default: detected from the chat template",
        (*REASONING_PARSERS, "none"),
    )
    additional_properties: bool = CHAT.option(
        False,
        "objects of JSON schemas (response_format, tools) may have properties that the schema does "
        "not name, unless a request says otherwise",
    )
    strict_requests: bool = SERVER.option(
        False,
        "refuse requests with unknown fields, instead of ignoring these fields",
    )
    api_key: tuple[str, ...] = SECURITY.option(
        (), "a key that clients must send; may be given several times"
    )
    api_key_file: str | None = SECURITY.option(
        None, "a file with one key per line, which `ps` does not show"
    )
    share_prefixes: bool = SECURITY.option(
        False,
        "requests with different keys share cached prompts: cached_tokens then says what others "
        "have sent",
    )
    admin_key: tuple[str, ...] = SECURITY.option(
        (),
        "a key for what concerns all users, such as /sleep, /compiler and LoRA adapters, which "
        "other keys then cannot do; may be given several times; default: every client can",
    )
    admin_key_file: str | None = SECURITY.option(
        None, "a file with one admin key per line, which `ps` does not show"
    )
    allow_origin: tuple[str, ...] = SECURITY.option(
        (),
        "an origin whose web pages may call the server (CORS), such as https://chat.example; may "
        "be given several times; *: all origins",
    )
    allow_host: tuple[str, ...] = SECURITY.option(
        (),
        "a host name by which clients without a key call the server on a loopback address, besides "
        "localhost, such as that of a proxy; may be given several times; *: any",
    )
    max_body_bytes: int = SECURITY.option(16 * 2**20, "maximum size of a request body", least=1)
    max_bodies_bytes: int = SECURITY.option(
        256 * 2**20, "maximum total size of the bodies of running requests"
    )
    allowed_local_media_path: tuple[str, ...] = IMAGES.option(
        (),
        "a folder that file: URLs of images may name files in; may be given several times; "
        "default: none",
    )
    allowed_media_domains: tuple[str, ...] = IMAGES.option(
        (),
        "a host that http and https URLs of images may name; may be given several times; *: any; "
        "only public addresses; default: none",
    )
    allowed_lora_path: tuple[str, ...] = LORA.option(
        (),
        "a folder below which /v1/load_lora_adapter may load LoRA adapters; may be given several "
        "times; default: none, adapters cannot be loaded or unloaded while serving",
    )
    limit_images: int = IMAGES.option(32, "maximum number of images of a request", least=0)
    ssl_certfile: str | None = SECURITY.option(None, "serve HTTPS with this certificate")
    ssl_keyfile: str | None = SECURITY.option(None, "the private key of the certificate")

    def __post_init__(self) -> None:
        check_values(self)
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}, expected 0 (any free one) to 65535")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes is {self.max_bodies_bytes}, it must be at least "
                f"max_body_bytes={self.max_body_bytes}"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"otlp_traces_endpoint is {endpoint!r}, expected a URL such as "
                "http://localhost:4318/v1/traces"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile: set both")
        for name in ("header_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be above 0")
        if self.drain_seconds is not None and not 0 <= self.drain_seconds < math.inf:
            raise ValueError(
                f"drain_seconds is {self.drain_seconds}, expected a number of seconds that is "
                "finite and at least 0"
            )
        self._check_access()

    def _check_access(self) -> None:
        for key in self.api_key:
            check_key(key, "api_key")
        for key in self.admin_key:
            check_key(key, "admin_key")
        if shared := set(self.api_key) & set(self.admin_key):
            raise ValueError(f"{len(shared)} of the admin keys are API keys, too: use other keys")
        for host in self.allow_host:
            if not host or set(host) & set(":/ "):
                raise ValueError(
                    f"allow_host is {host!r}, expected a host name without scheme and port, such "
                    "as chat.example"
                )
