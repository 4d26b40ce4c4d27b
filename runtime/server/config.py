"""ServerConfig: how requests come in. Flags of `atomc serve` are made from its fields, as from EngineConfig's."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from atomc.runtime.server.api_keys import check_key


def _option(default: Any, text: str, group: str = "server") -> Any:
    return field(default=default, metadata={"help": text, "group": group})


@dataclass(frozen=True)
class ServerConfig:
    """One HTTP server. Each field's metadata has a line of help and its group. Raises ValueError for wrong values."""

    host: str = _option("127.0.0.1", "the address to listen on; 0.0.0.0 lets other machines in")
    port: int = _option(8000, "0 takes a free one")
    served_model_name: tuple[str, ...] = _option((), "what clients call the model; may be given several times, the first "
                                                 "is in answers; left out: the directory's name, or the hub's")  # fmt: skip
    generation_config: Literal["model", "none"] = _option("model", "where sampling defaults come from: "
                                                          "generation_config.json of the model, or nowhere")  # fmt: skip
    max_logprobs: int = _option(20, "logprobs that a request may ask for, at most")
    drain_seconds: float = _option(30.0, "how long running requests may take to finish when the server is to end")
    engine_patience: float = _option(60.0, "seconds without an answer of the engine after which /health fails")
    engine_timeout: float = _option(600.0, "seconds without an answer after which the engine is killed, as if it had died; "
                                    "0: never")  # fmt: skip
    restart_engine: int = _option(0, "restarts of an engine that died, at most so many in a row, with growing pauses; "
                                  "then, and with 0, the server ends")  # fmt: skip
    header_timeout: float = _option(10.0, "seconds that a connection has to send the whole head of a request")
    body_timeout: float = _option(30.0, "seconds that a request has to send its body, and one more for every 10 kB of it")
    log_requests: bool = _option(True, "one line for each request when it ends")
    profile_dir: str | None = _option(None, "lets /start_profile and /stop_profile write profiles into this folder")
    chat_template: str | None = _option(None, "a file with the Jinja template to use instead of the model's", "chat")
    tool_call_parser: str | None = _option(None, "how the model writes tool calls: hermes (also qwen3), llama3, deepseek "
                                           "or gpt-oss; left out: told from its chat template", "chat")  # fmt: skip
    reasoning_parser: str | None = _option(None, "how the model marks what it thinks: think (also qwen3, deepseek-r1) or "
                                           "gpt-oss; none: it is part of the answer; left out: told from its chat template",
                                           "chat")  # fmt: skip
    api_key: tuple[str, ...] = _option((), "clients must send this key; may be given several times", "security")
    api_key_file: str | None = _option(None, "a file with one key a line, which `ps` does not show", "security")
    allow_origin: tuple[str, ...] = _option((), "web pages of this origin may call the server (CORS); may be given several "
                                            "times, * means all", "security")  # fmt: skip
    max_body_bytes: int = _option(16 * 2**20, "size of a request's body, at most", "security")
    max_bodies_bytes: int = _option(256 * 2**20, "size of the bodies of all requests under way, at most", "security")
    ssl_certfile: str | None = _option(None, "serve https with this certificate", "security")
    ssl_keyfile: str | None = _option(None, "the certificate's key", "security")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}, expected 0 (any free one) to 65535")
        for name, least in (("max_logprobs", 0), ("max_body_bytes", 1), ("drain_seconds", 0), ("engine_patience", 1),
                            ("engine_timeout", 0), ("restart_engine", 0)):  # fmt: skip
            if not getattr(self, name) >= least:  # nan is not, either
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least {least}")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(f"max_bodies_bytes is {self.max_bodies_bytes}, it must be at least "
                             f"max_body_bytes={self.max_body_bytes}")  # fmt: skip
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile is the key of a certificate: give ssl_certfile too")
        for name in ("header_timeout", "body_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be above 0")
        if not math.isfinite(self.drain_seconds):
            raise ValueError(f"drain_seconds is {self.drain_seconds}, expected a number of seconds")
        for key in self.api_key:
            check_key(key, "api_key")
        if self.generation_config not in ("model", "none"):
            raise ValueError(f"generation_config is {self.generation_config!r}, expected 'model' or 'none'")
