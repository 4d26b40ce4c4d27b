"""Images in chats: over HTTP and with LLM.chat the same answers as transformers, and errors for images
and messages that cannot be used.
"""

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("PIL")
pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
import torch  # noqa: E402
from image_files import (  # noqa: E402
    IMAGE_TOKEN_ID,
    data_url,
    encoded,
    image_processor,
    picture,
    png_of_zeros,
    slow_png,
    write_vision_model,
)
from processes import children, wait_until  # noqa: E402
from serving import COMPILED, serving  # noqa: E402
from test_image_decode import DAMAGED  # noqa: E402

from atomc import LLM, SamplingParams  # noqa: E402

pytestmark = pytest.mark.xdist_group("server images")
# The pixels of an image of 64 x 64 are 64 patches of 8 x 8 x 3 x 2 values.
IMAGE_BYTES = 64 * 8 * 8 * 3 * 2 * 4
LIMIT = 4
NEW = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def theirs(folder):
    return write_vision_model(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "allowed").mkdir()
    (folder / "allowed" / "a.png").write_bytes(encoded(picture(40, 24)))
    (folder / "secret.png").write_bytes(encoded(picture(40, 24)))
    (folder / "allowed" / "link.png").symlink_to(folder / "secret.png")
    return folder


@pytest.fixture(scope="module")
def server(folder, theirs, files):
    with serving(
        folder,
        "--served-model-name",
        "tiny",
        "--allowed-local-media-path",
        files / "allowed",
        "--allowed-media-domains",
        "*",
        "--limit-images",
        LIMIT,
        "--image-queue-bytes",
        3 * IMAGE_BYTES,
        "--max-model-len",
        256,
        "--options",
        "glue=eager",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def llm(folder, server):
    """Loads what the server has compiled."""
    options = {"glue": "eager", "cache": True, "cache_dir": COMPILED}
    return LLM(folder, options=options, progress=False, max_model_len=256)


def text(value):
    return {"type": "text", "text": value}


def url_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


def png(image):
    return url_part(data_url(encoded(image)))


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


IMAGES = [picture(40, 24, 1), picture(17, 60, 2), picture(64, 64, 3)]
ONE = user(text("What is it? "), png(IMAGES[0]))
THREE = user(*(part for each in IMAGES for part in (text("And "), png(each))), text("?"))


@pytest.mark.parametrize("images, messages", [(IMAGES[:1], ONE), (IMAGES, THREE)])
def test_answers_are_those_of_transformers(theirs, client, http, llm, images, messages):
    found = client.chat.completions.create(model="tiny", messages=messages, **NEW)
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    with torch.no_grad():
        expected = theirs.generate(
            input_ids=torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            mm_token_type_ids=torch.tensor([[int(one == IMAGE_TOKEN_ID) for one in tokens]]),
            **image_processor()(images=images, return_tensors="pt"),
            do_sample=False,
            max_new_tokens=NEW["max_tokens"],
        )[0, len(tokens) :].tolist()
    (offline,) = llm.chat(messages, SamplingParams(**NEW))
    assert offline.prompt_token_ids == tuple(tokens)
    assert list(offline.token_ids) == expected and len(set(expected)) > 1
    assert found.choices[0].message.content == offline.text

    pil = [
        {"type": "image", "image": images[int(i)]} if part["type"] == "image_url" else part
        for i, part in zip(number_of_images(messages), messages[0]["content"], strict=True)
    ]
    assert llm.chat(user(*pil), SamplingParams(**NEW))[0].token_ids == offline.token_ids


def number_of_images(messages):
    """For each part, the number of images before it."""
    count = 0
    for part in messages[0]["content"]:
        yield count
        count += part["type"] == "image_url"


@pytest.mark.rotating
def test_usage_counts_the_tokens_of_images(client, http):
    tokens = http.post("/tokenize", json={"messages": THREE}).json()["tokens"]
    used = client.chat.completions.create(model="tiny", messages=THREE, **NEW).usage
    assert used.prompt_tokens == len(tokens)
    # 40 x 24 becomes 32 x 32, 17 x 60 becomes 16 x 64, and a token is 16 x 16 pixels.
    assert used.prompt_tokens_details.image_tokens == tokens.count(IMAGE_TOKEN_ID) == 4 + 4 + 16
    again = client.chat.completions.create(model="tiny", messages=THREE, **NEW).usage
    assert again.prompt_tokens == len(tokens) and again.prompt_tokens_details.cached_tokens > 0
    hello = [{"role": "user", "content": "Hello"}]
    used = client.chat.completions.create(model="tiny", messages=hello, **NEW).usage
    assert used.prompt_tokens_details.image_tokens is None


def test_a_stream_gives_the_text_and_usage_of_the_whole_answer(client):
    whole = client.chat.completions.create(model="tiny", messages=ONE, **NEW)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=ONE,
            stream=True,
            stream_options={"include_usage": True},
            **NEW,
        )
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    image_tokens = chunks[-1].usage.prompt_tokens_details.image_tokens
    assert image_tokens == whole.usage.prompt_tokens_details.image_tokens == 4


@pytest.mark.rotating
def test_anthropics_api_reads_the_same_images(http):
    def block(part):
        if part["type"] == "text":
            return part
        data = part["image_url"]["url"].partition(",")[2]
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return {"type": "image", "source": source}

    messages = user(*map(block, THREE[0]["content"]))
    whole = http.post("/v1/chat/completions", json={"messages": THREE, **NEW}).json()
    found = http.post("/v1/messages", json={"messages": messages, **NEW}).json()
    assert found["content"][0]["text"] == whole["choices"][0]["message"]["content"]
    count = http.post("/v1/messages/count_tokens", json={"messages": messages}).json()
    assert count["input_tokens"] == whole["usage"]["prompt_tokens"]
    damaged = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages = user(text("x"), {"type": "image", "source": damaged})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        new = NEW if path == "/v1/messages" else {}
        answer = http.post(path, json={"messages": messages, **new})
        assert answer.status_code == 400 and "image is damaged" in answer.json()["error"]["message"]


def test_choices_of_one_prompt_see_the_same_image(client):
    found = client.chat.completions.create(model="tiny", messages=ONE, n=3, **NEW)
    assert len({choice.message.content for choice in found.choices}) == 1
    alone = client.chat.completions.create(model="tiny", messages=ONE, **NEW)
    assert found.choices[0].message.content == alone.choices[0].message.content


@pytest.mark.rotating
def test_models_names_the_modalities(http):
    (model,) = http.get("/v1/models").json()["data"]
    assert model["input_modalities"] == ["text", "image"]


def test_every_source_gives_the_same_answer(client, files):
    image = encoded(picture(40, 24))
    sources = [
        url_part(data_url(image)),
        url_part(f"file://{files}/allowed/a.png"),
        {"type": "input_image", "image_url": data_url(image)},
        {"type": "video", "video": [data_url(image)]},
    ]
    answers = {
        client.chat.completions.create(model="tiny", messages=user(each), **NEW)
        .choices[0]
        .message.content
        for each in sources
    }
    assert len(answers) == 1


@pytest.mark.rotating
def test_requests_with_different_images_at_once(client):
    messages = [user(text("Look: "), png(picture(24 + 8 * i, 40, i))) for i in range(6)]

    def ask(each):
        found = client.chat.completions.create(model="tiny", messages=each, **NEW)
        return found.choices[0].message.content

    alone = [ask(each) for each in messages]
    with ThreadPoolExecutor(6) as pool:
        # Each image needs memory; those of all may exceed the limit for a moment.
        together = list(pool.map(lambda each: retried(ask, each), messages))
    assert together == alone and len(set(alone)) > 1


def retried(ask, messages):
    for _ in range(100):
        try:
            return ask(messages)
        except (openai.RateLimitError, openai.InternalServerError) as error:
            assert error.status_code in (429, 503)
    raise AssertionError("refused each time")


def test_images_above_the_memory_limit_are_refused_and_leave_nothing_behind(http, client):
    large = png(picture(64, 64))
    for _ in range(3):
        answer = http.post("/v1/chat/completions", json={"messages": user(*[large] * 4)})
        assert answer.status_code == 400
        assert f"the limit of {3 * IMAGE_BYTES} bytes" in answer.json()["error"]["message"]
    client.chat.completions.create(model="tiny", messages=user(*[large] * 3), **NEW)


def refused(http, messages, message, code=None, status=400, **more):
    answer = http.post("/v1/chat/completions", json={"messages": messages, **more})
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["type"] == "invalid_request_error" and error["param"] == "messages", error
    assert message in error["message"] and "\n" not in error["message"], error
    assert "/tmp" not in error["message"] and (code is None or error["code"] == code), error
    return error["message"]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_image_is_a_400(http, name):
    data, message = DAMAGED[name]
    expected = "empty" if name == "empty" else message.split("|")[0].split(",")[0]
    refused(http, user(text("x"), url_part(data_url(data))), expected, "invalid_image")


GOOD = data_url(encoded(picture(24, 24)))
MESSAGES = {
    "no URL": ({"type": "image_url"}, "no URL of an image"),
    "empty image_url": ({"type": "image_url", "image_url": {}}, "no URL of an image"),
    "URL is null": (url_part(None), "no URL of an image"),
    "URL is a number": (url_part(5), "no URL of an image"),
    "URL is an object": (url_part({"url": GOOD}), "no URL of an image"),
    "URL is empty": (url_part(""), "begins with ''"),
    "image is null": ({"type": "image", "image": None}, "no URL of an image"),
    "image is bytes": ({"type": "image", "image": [1, 2, 3]}, "no URL of an image"),
    "unknown field": ({**url_part(GOOD), "size": 5}, "has the field 'size'"),
    "unknown inner field": (
        {"type": "image_url", "image_url": {"url": GOOD, "size": 5}},
        "has the field 'size'",
    ),
    "unknown detail": (
        {"type": "image_url", "image_url": {"url": GOOD, "detail": "best"}},
        "detail is 'best'",
    ),
    "audio": ({"type": "input_audio", "input_audio": {"data": ""}}, "'input_audio' is not supported"),
    "type is a list": ({"type": ["image"], "image": GOOD}, "is not supported"),
    "no type": ({"image_url": {"url": GOOD}}, "type None is not supported"),
    "a video that is a URL": ({"type": "video", "video": GOOD}, "no list of frames"),
    "a video without frames": ({"type": "video", "video": []}, "no list of frames"),
    "a video with too many frames": (
        {"type": "video", "video": [GOOD] * (LIMIT + 1)},
        f"{LIMIT + 1} images, at most {LIMIT} are allowed",
    ),
    "a video with a damaged frame": (
        {"type": "video", "video": [GOOD, "data:;base64,AAAA"]},
        "image 2 of 2: the image is damaged",
    ),
    "base64 without data:": (url_part(GOOD.partition(",")[2]), "expected data:image/png;base64"),
    "not base64": (url_part(GOOD[:40] + "!" + GOOD[40:]), "not valid base64"),
    "not of an image": (url_part(GOOD.replace("image/png", "text/html")), "the type 'text/html'"),
    "data: without base64": (url_part("data:image/png,abc"), "is not data:image/png;base64"),
    "ftp": (url_part("ftp://example.com/a.png"), "expected data:image/png;base64"),
    "a path": (url_part("/etc/passwd"), "expected data:image/png;base64"),
    "a file outside": (url_part("file:///etc/passwd"), "no image in an allowed folder"),
    "a pipe": (url_part("file:///dev/zero"), "no image in an allowed folder"),
    "a file of another host": (url_part("file://host/a.png"), "expected file:///path"),
    "loopback": (url_part("http://127.0.0.1:1/a.png"), "an address that is not public"),
    "loopback by name": (url_part("http://localhost:1/a.png"), "an address that is not public"),
    "loopback in IPv6": (url_part("http://[::ffff:127.0.0.1]/a"), "an address that is not public"),
    "metadata of a cloud": (
        url_part("http://169.254.169.254/latest/meta-data"),
        "an address that is not public",
    ),
    "private": (url_part("https://10.0.0.1/a.png"), "an address that is not public"),
    "a password": (url_part("http://a:b@example.com/a.png"), "not a valid http or https URL"),
    "too thin": (png(picture(3000, 4)), "aspect ratio must be smaller than 200"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_part_that_cannot_be_used_is_a_400(http, name):
    part, message = MESSAGES[name]
    refused(http, user(text("x"), part), message)


def test_there_are_at_least_forty_of_them():
    assert len(DAMAGED) + len(MESSAGES) >= 40


def test_further_messages_that_cannot_be_used(http, files):
    secret = f"file://{files}/allowed/link.png"
    refused(http, user(url_part(secret)), "no image in an allowed folder", "invalid_image")
    secret = f"file://{files}/allowed/../secret.png"
    refused(http, user(url_part(secret)), "no image in an allowed folder", "invalid_image")
    refused(http, user(*[png(IMAGES[0])] * 5), "5 images, at most 4 are allowed")
    refused(http, user(text("<|image"), text("_pad|>")), "wrote 1 image tokens for 0 images")
    message = refused(http, user(png(IMAGES[0]), url_part("data:;base64,AAAA")), "damaged")
    assert message.startswith("image 2 of 2: ")
    long = user(text("x" * 240), png(IMAGES[0]))
    message = refused(http, long, "maximum context length of 256", "context_length_exceeded")
    assert "4 tokens" in message
    tokens = {"messages": user(url_part("data:;base64,AAAA"))}
    assert http.post("/tokenize", json=tokens).status_code == 400


def test_a_literal_image_token_does_not_become_an_image(http, client):
    messages = user(text("<|image_pad|> and "), png(IMAGES[0]))
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert tokens.count(IMAGE_TOKEN_ID) == 4
    used = client.chat.completions.create(model="tiny", messages=messages, **NEW).usage
    assert used.prompt_tokens_details.image_tokens == 4


def test_a_web_server_of_this_machine_is_never_asked(http):
    asked = []

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(encoded(IMAGES[0]))

    with HTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{pages.server_port}/a.png"
        assert httpx.get(url).status_code == 200
        refused(http, user(url_part(url)), "an address that is not public", "invalid_image")
        pages.shutdown()
    assert asked == ["/a.png"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_bomb_does_not_grow_the_server(server, http):
    bomb = user(url_part(data_url(png_of_zeros(20_000, 20_000))))
    before = server.memory(server.process.pid)
    for _ in range(3):
        refused(http, bomb, "more than 33554432 pixels")
    assert server.memory(server.process.pid) - before < 100 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_client_that_leaves_stops_the_work_on_its_image(server, client):
    def decode_workers():
        return [
            pid
            for pid in children(server.process.pid)
            if b"decode_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    (worker,) = decode_workers()
    body = json.dumps({"messages": user(url_part(data_url(slow_png())))})
    connection = HTTPConnection("127.0.0.1", urlsplit(server.url).port)
    with closing(connection):
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        wait_until(lambda: any(map(children, children(worker))))
        for supervisor in children(worker):
            for decoding in children(supervisor):  # ends only if it is killed
                os.kill(decoding, signal.SIGSTOP)
    wait_until(lambda: not children(worker))
    client.chat.completions.create(model="tiny", messages=ONE, **NEW)


def test_other_requests_continue_while_images_are_refused(http, client):
    alone = client.chat.completions.create(model="tiny", messages=ONE, **NEW)

    def bad(i):
        refused(http, user(url_part(data_url(DAMAGED["flipped bits"][0]))), "damaged")

    with ThreadPoolExecutor(4) as pool:
        pending = [pool.submit(bad, i) for i in range(20)]
        found = client.chat.completions.create(model="tiny", messages=ONE, **NEW)
        for each in pending:
            each.result()
    assert found.choices[0].message.content == alone.choices[0].message.content


# LLM.chat


def test_chats_offline_are_answered_in_order(llm):
    hello = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(**NEW)
    together = llm.chat([ONE, hello, THREE], params)
    alone = [llm.chat(each, params)[0] for each in (ONE, hello, THREE)]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    assert len(llm.chat(ONE, SamplingParams(n=2, **NEW))) == 2
