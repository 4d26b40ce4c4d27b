"""Requests that take as much of a server as one request can, by name: where they go, and their
bodies.
"""

import base64
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

LETTERS = "She looked at him and said that nothing was wrong. "
COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
MODEL = "atomc-demo"
USER = {"role": "user", "content": "Once"}
PARTS = [{"type": "input_text", "text": "x"}] * 80_000


def dumped(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def completion(**more: Any) -> bytes:
    return json.dumps(
        {"model": MODEL, "prompt": "Once", "max_tokens": 200, "temperature": 1, **more}
    ).encode()


def chat(**more: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [USER], "max_tokens": 200, **more}).encode()


def lark(length: int) -> str:
    return "start: " + " | ".join(f'"item{i}" start' for i in range(length)) + ' | "end"\n'


def chain(length: int) -> str:
    return (
        "".join(f'r{i}: r{i + 1} | "x{i}"\n' for i in range(length))
        + f'r{length}: "y"\nstart: r0\n'
    )


def nested(depth: int) -> str:
    """A schema, as text: what encodes JSON does not go so deep."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


def stops() -> list[str]:
    return ["e" * 255 + chr(33 + i) for i in range(32)]


def items() -> list[str]:
    return [f"item {i}" for i in range(1000)]


def raw(field: str, value: bytes) -> bytes:
    return b'{"model":"atomc-demo","max_tokens":2,"' + field.encode() + b'":' + value + b"}"


def image(kind: str, data: bytes) -> bytes:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return chat(messages=[{"role": "user", "content": [part]}], max_tokens=2)


def long_bitmap() -> bytes:
    """One row of 2^25 pixels, whose run-length encoding is a kilobyte of runs."""
    header = struct.pack("<IiiHHIIiiII", 40, 2**25, 1, 1, 8, 1, 0, 0, 0, 2, 0)
    data = header + bytes(8) + b"\xff\x01" * 400 + b"\x00\x01"
    return b"BM" + struct.pack("<IHHI", 14 + len(data), 0, 0, 62) + data


def blank_png(width: int, height: int, color: int = 0) -> bytes:
    """Gray (color type 0) or transparent (6) pixels, compressed to almost nothing."""
    samples = 4 if color == 6 else 1

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    compressor = zlib.compressobj(9)
    rows = b"".join(compressor.compress(bytes(1 + samples * width)) for _ in range(height))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))
        + chunk(b"IDAT", rows + compressor.flush())
        + chunk(b"IEND", b"")
    )


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    # Grammars.
    "lark grammar of 2 MB": (COMPLETIONS, lambda: completion(guided_grammar=lark(100_000))),
    "lark grammar of 200 kB": (COMPLETIONS, lambda: completion(guided_grammar=lark(10_000))),
    "regex (a{1000}){1000}": (COMPLETIONS, lambda: completion(guided_regex="(a{1000}){1000}")),
    "regex (a{1000}){300}": (COMPLETIONS, lambda: completion(guided_regex="(a{1000}){300}")),
    "regex slow after 200 letters": (COMPLETIONS, lambda: completion(guided_regex="[a-z]{200}(a{1000}){200}", max_tokens=400)),
    "ambiguous grammar": (COMPLETIONS, lambda: completion(guided_grammar='start: s\ns: s s | s s s | "a" | /[a-z]/ |\n')),
    "grammar of a chain of rules": (COMPLETIONS, lambda: completion(guided_grammar=chain(3_000))),
    "choice of 1,000 texts, n=128": (COMPLETIONS, lambda: completion(guided_choice=items(), n=128)),
    "schema of 2,000 properties": (CHAT, lambda: chat(guided_json={
        "type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}})),
    "schema nested 500 deep": (CHAT, lambda: chat(guided_json="?").replace(b'"?"', nested(500).encode())),
    "schema text nested 500 deep": (CHAT, lambda: chat(guided_json=nested(500))),
    # Texts and tokens.
    "prompt of 10 MB": (COMPLETIONS, lambda: completion(prompt=LETTERS * 200_000)),
    "prompts: 1,000 of 8 kB": (COMPLETIONS, lambda: completion(prompt=[LETTERS * 160] * 1000, max_tokens=1)),
    "prompts: 1,000 of 1 kB": (COMPLETIONS, lambda: completion(prompt=[LETTERS * 20] * 1000, max_tokens=1)),
    "prompt of 5,000,000 token ids": (COMPLETIONS, lambda: completion(prompt=[1] * 5_000_000)),
    "prompt of 250,000 wrong token ids": (COMPLETIONS, lambda: completion(prompt=[-1] * 250_000)),
    "embeddings of 1,000 texts": (EMBEDDINGS, lambda: dumped(input=[LETTERS * 2] * 1000)),
    "message of 10 MB": (CHAT, lambda: chat(messages=[{"role": "user", "content": LETTERS * 200_000}])),
    "message of 16,000 blocks": (MESSAGES, lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "e"}] * 16_000}])),
    "message of 2,000 blocks": (MESSAGES, lambda: chat(messages=[{"role": "user", "content": [{"type": "text", "text": "e"}] * 2_000}])),
    "messages: 100,000": (CHAT, lambda: chat(messages=[USER] * 100_000)),
    "messages: 4,000": (CHAT, lambda: chat(messages=[USER] * 4_000)),
    "input of 80,000 parts": (RESPONSES, lambda: dumped(input=[{"role": "user", "content": PARTS}])),
    "tokenize 10 MB": ("/tokenize", lambda: json.dumps({"prompt": LETTERS * 200_000, "return_token_strs": True}).encode()),
    "tokenize 300 kB": ("/tokenize", lambda: json.dumps({"prompt": LETTERS * 6_000, "return_token_strs": True}).encode()),
    "detokenize 130,000": ("/detokenize", lambda: json.dumps({"tokens": [300] * 130_000}).encode()),
    # Parameters.
    "stop: 900,000 texts": (COMPLETIONS, lambda: completion(stop=[f"s{i}" for i in range(900_000)])),
    "stop: 32 texts of 256, n=128": (COMPLETIONS, lambda: completion(stop=stops(), n=128)),
    "n=128, logprobs=20": (COMPLETIONS, lambda: completion(n=128, logprobs=20)),
    "n=25, logprobs=20": (COMPLETIONS, lambda: completion(n=25, logprobs=20, max_tokens=1000)),
    "logprobs of 25 long prompts": (COMPLETIONS, lambda: completion(prompt=[LETTERS * 80] * 25, prompt_logprobs=20)),
    "n=128": (COMPLETIONS, lambda: completion(n=128)),
    "logit_bias of 3,000, n=128": (COMPLETIONS, lambda: completion(logit_bias={str(i): 1.0 for i in range(3000)}, n=128)),
    "logit_bias of 1,000, n=128": (COMPLETIONS, lambda: completion(logit_bias={str(i): 1.0 for i in range(1000)}, n=128)),
    "stop_token_ids: 1,000": (COMPLETIONS, lambda: completion(stop_token_ids=list(range(1000, 2000)), n=64)),
    # JSON.
    "body of 5,000,000 lists": (COMPLETIONS, lambda: raw("prompt", b"[" + b"[]," * 5_000_000 + b"[]]")),
    "body nested 1,000,000 deep": (COMPLETIONS, lambda: raw("prompt", b"[" * 1_000_000)),
    "body of 500,000 unknown fields": (COMPLETIONS, lambda: json.dumps({f"f{i}": 1 for i in range(500_000)}).encode()),
    "body of 262,000 keys": (COMPLETIONS, lambda: raw("logit_bias", json.dumps({str(i): 1 for i in range(262_000)}).encode())),
    "body of 2,700,000 numbers, UTF-16": (COMPLETIONS, lambda: raw("prompt", b"[" + b"1," * 2_700_000 + b"1]").decode().encode("utf-16")),
    "body nested 500 deep, UTF-32": (COMPLETIONS, lambda: raw("prompt", b"[" * 500 + b"]" * 500).decode().encode("utf-32")),
    "body of 16 MB of quotes": (COMPLETIONS, lambda: raw("prompt", b'"' * 16_000_000)),
    # Images: on a model that reads them. 400 on the others.
    "run-length BMP of 2^25 x 1": (CHAT, lambda: image("bmp", long_bitmap())),
    "JPEG of 50,000 segments": (CHAT, lambda: image("jpeg", b"\xff\xd8" + b"\xff\xe1\x00\x08Exif\x00\x00" * 50_000)),
    "PNG of 5,000 x 5,000": (CHAT, lambda: image("png", blank_png(5_000, 5_000))),
    "PNG of 16,000 x 16,000": (CHAT, lambda: image("png", blank_png(16_000, 16_000))),
    "PNG of 3,000 x 3,000, transparent": (CHAT, lambda: image("png", blank_png(3_000, 3_000, color=6))),
    "PNG of 16,000 x 1": (CHAT, lambda: image("png", blank_png(16_000, 1))),
    "8 MB that are no image": (CHAT, lambda: image("png", bytes(8_000_000))),
}  # fmt: skip
