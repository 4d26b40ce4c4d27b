"""Random wrong requests over all APIs of a server, and random damaged images: which were answered with
what.

    python bench/hostile_bodies.py --count 3000
    python bench/hostile_bodies.py --url http://127.0.0.1:8000 --images 200

Fields are those of the server's own /openapi.json; bodies are UTF-8, UTF-16 and UTF-32. Without
--url it starts `atomc serve` on the demo, or on --model. It fails if an answer is a 5xx, an error is
not JSON, a connection breaks, or the server does not answer a request afterwards.
"""

import argparse
import base64
import collections
import http.client
import io
import json
import random
import struct
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))
from bystander import demo, running
from tqdm import tqdm

ENCODINGS = (*["utf-8"] * 24, "utf-16", "utf-32", "utf-16-le", "utf-32-be")
IMAGE_KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# They stop the server or write files, which is what they are for.
LEFT_OUT = ("profile", "/sleep", "/wake_up")
SCALARS: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**64, -(2**63), 1e308, 0.5, -0.0, 2, 3, 7, 0.9, float("nan"),
    float("inf"), "", "x", "\x00", "\ud800", "a" * 5000, "\N{ZERO WIDTH JOINER}" * 40, "[" * 60,
    "{% for i in range(9) %}", "auto", "none", "json_schema", "../../etc/passwd", "data:,", "file:///x",
    [], {}, [[]], [None], [{}], [-1], [1] * 3000, ["x"] * 300, {"": None}, {"type": "x"},
    {"type": "text", "text": 3}, {"role": "user"}, {"role": [], "content": {}},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
    [{"type": "function", "function": {"name": "", "parameters": {"type": "x"}}}],
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
)  # fmt: skip
USER = [{"role": "user", "content": "Once"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 4},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "Once", "max_output_tokens": 4},
    "/v1/embeddings": {"input": "Once"},
    "/tokenize": {"prompt": "Once"},
    "/detokenize": {"tokens": [300]},
}


def nested(rng: random.Random) -> Any:
    value: Any = rng.choice(SCALARS)
    for _ in range(rng.choice((*[0] * 12, 1, 3, 90, 300))):
        value = [value] if rng.random() < 0.5 else {rng.choice(("a", "type", "items", "")): value}
    return value


def body(rng: random.Random, path: str, fields: list[str]) -> bytes:
    """A valid request of `path`, of which some fields have wrong values, or whose text is damaged."""
    request = dict(VALID.get(path, {}))
    names = [name for name in fields if not name.startswith("max_")]
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2, 4)))):
        request[name] = nested(rng)
    if rng.random() < 0.05:
        request = {**request, **{f"field{i}": i for i in range(rng.choice((1, 2000)))}}
    value: Any = request if rng.random() < 0.93 else nested(rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8)
    damage = rng.random()
    if damage < 0.04:
        text = text[: rng.randrange(len(text) + 1)]
    elif damage < 0.07:
        text = text.replace("{", '{"model": 3, "model": [],', 1)
    elif damage < 0.09:
        text = text.replace(rng.choice('",:{}['), rng.choice(("", "\\", "'", "\x00")))
    data = text.encode(rng.choice(ENCODINGS), "surrogatepass")
    if rng.random() < 0.05 and data:
        position = rng.randrange(len(data))
        data = data[:position] + bytes([rng.randrange(256)]) + data[position + 1 :]
    return data


def image(rng: random.Random) -> bytes:
    """An image file that is damaged, has a wrong header, or is as expensive as a file can be."""
    from PIL import Image

    kind, mode = rng.choice(IMAGE_KINDS), rng.choice(("RGB", "L", "RGB"))
    size = rng.choice(((8, 8), (64, 48), (300, 200), (1, 4000), (4000, 1), (2000, 2000)))
    file = io.BytesIO()
    Image.new(mode, size, 7).save(file, kind)
    data = bytearray(file.getvalue())
    match rng.randrange(7):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            for _ in range(rng.choice((1, 10, 100))):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 2:
            for _ in range(3):  # in the header, where the sizes are
                data[rng.randrange(min(len(data), 40))] = rng.randrange(256)
        case 3:
            width = rng.choice((2**25, 2**31 - 1, 20_000))
            header = struct.pack(
                "<IiiHHIIiiII", 40, width, rng.choice((1, 20_000)), 1, 8, 1, 0, 0, 0, 2, 0
            )
            data = bytearray(
                b"BM" + struct.pack("<IHHI", 1000, 0, 0, 62) + header + bytes(8) + bytes(900)
            )
        case 4:
            segment = b"\xff\xe1\x00\x08Exif\x00\x00"
            file = io.BytesIO()
            Image.new("RGB", (64, 64)).save(file, "JPEG")
            data = bytearray(
                b"\xff\xd8" + segment * rng.choice((2, 900, 50_000)) + file.getvalue()[2:]
            )
        case 5:
            data += bytes(rng.choice((1, 100_000)))
        case _:
            data = bytearray(
                rng.choice((b"", b"GIF89a", b"<svg/>", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", b"RIFF"))
            )
    return bytes(data)


def image_request(rng: random.Random, model: str) -> bytes:
    kind = rng.choice(("image/png", "image/jpeg", "text/plain", ""))
    url = f"data:{kind};base64,{base64.b64encode(image(rng)).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 2}).encode()


class Tally:
    """How requests were answered, and what no request may be answered with."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.statuses: collections.Counter[tuple[str, int]] = collections.Counter()
        self.faults: list[str] = []
        self.slowest = (0.0, "")

    def send(self, method: str, path: str, data: bytes, content_type: str) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=120)
        begin = time.monotonic()
        try:
            connection.request(method, path, data, {"Content-Type": content_type})
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.faults.append(f"{path}: {error!r} after {data[:300]!r}")
            return
        finally:
            connection.close()
        self.slowest = max(self.slowest, (time.monotonic() - begin, f"{path} {data[:80]!r}"))
        self.statuses[path, answer.status] += 1
        if answer.status >= 500 or (answer.status >= 400 and not _is_an_error(text)):
            self.faults.append(f"{path}: {answer.status} {text[:300]!r} to {data[:300]!r}")


def _is_an_error(text: bytes) -> bool:
    try:
        return bool(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return False


def _fields(schema: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    return [*schema["components"]["schemas"].get(name, {}).get("properties", {})]


def attack(url: str, count: int, images: int, seed: int) -> Tally:
    """Send `count` bodies and `images` images to the server at `url`."""
    rng, tally = random.Random(seed), Tally(urlsplit(url).netloc)
    connection = http.client.HTTPConnection(tally.address, timeout=60)
    connection.request("GET", "/openapi.json")
    schema = json.loads(connection.getresponse().read())
    connection.request("GET", "/v1/models")
    model = json.loads(connection.getresponse().read())["data"][0]["id"]
    operations = [
        (path, _fields(schema, methods["post"]))
        for path, methods in schema["paths"].items()
        if "post" in methods and not any(word in path for word in LEFT_OUT)
    ]
    for i in tqdm(range(count), "bodies"):
        path, fields = operations[i % len(operations)]
        kind = rng.choice(("application/json",) * 9 + ("text/plain",))
        tally.send("POST", path, body(rng, path, fields), kind)
    for _ in tqdm(range(images), "images", disable=not images):
        tally.send("POST", "/v1/chat/completions", image_request(rng, model), "application/json")
    tally.send(
        "POST", "/v1/completions", json.dumps(VALID["/v1/completions"]).encode(), "application/json"
    )
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server that runs")
    parser.add_argument("--model", help="the folder of a model to serve")
    parser.add_argument("--count", type=int, default=3000, help="wrong bodies")
    parser.add_argument("--images", type=int, default=0, help="damaged images")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with running(arguments.url) if arguments.url else demo(arguments.model) as url:
        tally = attack(url, arguments.count, arguments.images, arguments.seed)
    for (path, status), number in sorted(tally.statuses.items()):
        print(f"{path:32}{status:6}{number:8}")
    print(f"slowest: {tally.slowest[0]:.2f} s, {tally.slowest[1]}")
    print(
        f"{sum(tally.statuses.values())} answers, {len(tally.faults)} faults",
        *tally.faults,
        sep="\n",
    )
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
