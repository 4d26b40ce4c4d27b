"""Requests over HTTP that used to end the engine or to delay all others: each is rejected or fails
with the reason, and another stream continues."""

import json
import re
import shutil
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))
from hostile import HOSTILE  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from serving import serving  # noqa: E402

from atomc import demo  # noqa: E402

pytestmark = pytest.mark.xdist_group("hostile")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# After this token the model returns NaN.
POISON = 777
DEEP = '{"properties":{"a":' * 500 + "{}" + "}}" * 500
# From Python's JSON parser before 3.12, or from the schema compiler.
TOO_DEEP = "json_schema: (it is nested too deep|recursion limit exceeded)"
BYSTANDER = {
    "prompt": "She looked at him and said",
    "max_tokens": 30,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo model with an embedding that is NaN, and an epsilon of its own, so that no other
    test has compiled it for embeddings.
    """
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(demo.PATH, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__*"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors")
    config = json.loads((Path(demo.PATH) / "config.json").read_text()) | {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1.25e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    flags = ["--served-model-name", "atomc-demo", "--options", "layout=paged"]
    with serving(folder, *flags, "--grammar-seconds", 1) as found:
        yield found


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def alone(http):
    return text_of(http.post("/v1/completions", json=BYSTANDER | {"stream": True}).iter_lines())


def text_of(lines):
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def asked(**body):
    return {"prompt": [5, 6, 7], "max_tokens": 5, "temperature": 0, **body}


REFUSED = [
    (asked(guided_json=DEEP), TOO_DEEP),
    (asked(structured_outputs={"json": DEEP}), TOO_DEEP),
    (asked(guided_regex=r"[^\s\S]"), "regex: no text matches it"),
    (asked(guided_json={"$ref": "#"}), "json_schema: no text matches it"),
    (
        asked(
            guided_json={
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {}}} for i in range(4)]}
                    for j in range(6)
                ]
            }
        ),
        "json_schema: (it is too complex|it takes more than|it needs more than|schema too large)",
    ),
    (
        asked(repetition_penalty=1e-38, temperature=1),
        "repetition_penalty is 1e-38, it must be at least 1e-06",
    ),
    (
        asked(repetition_penalty=1e38),
        r"repetition_penalty is 1e\+38, it must be at least 1e-06 and at most 1000000",
    ),
    (asked(stop_token_ids=list(range(3072)), min_tokens=2), "stop_token_ids"),
    (asked(stop_token_ids=list(range(3072)), min_tokens=2, temperature=1), "stop_token_ids"),
]
FAILED = [
    (
        asked(prompt=[5, POISON]),
        "the model produced logits that are NaN in step 1 of this request (position 2)",
    ),
    (asked(prompt=[5, POISON], temperature=1), "NaN in step 1"),
    (
        asked(
            prompt=[5, POISON], temperature=1, top_p=0.9, top_k=3, frequency_penalty=1, logprobs=2
        ),
        "NaN in step 1",
    ),
    (asked(prompt=[5, POISON], guided_regex="[a-z]{9}"), "NaN in step 1"),
    (asked(prompt=[5, POISON], n=3, temperature=1), "NaN in step 1"),
    (
        asked(prompt=[5, POISON, 6], echo=True, logprobs=1),
        "NaN in step 1 of this request (position 3)",
    ),
    (asked(logit_bias={POISON: 100}), "NaN in step 2 of this request (position 4)"),
]


@pytest.fixture
def bystander(server, http, alone):
    """A stream that is opened before the test and read after it."""
    with http.stream("POST", "/v1/completions", json=BYSTANDER | {"stream": True}) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        yield
        assert text_of([first, *lines]) == alone
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(("body", "part"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_client_caused_is_a_400(http, bystander, body, part, stream):
    answer = http.post("/v1/completions", json=body | {"stream": stream})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and re.search(part, message), message


@pytest.mark.parametrize(("body", "part"), FAILED)
def test_what_fails_while_it_is_computed_is_the_status_of_the_answer(http, bystander, body, part):
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "hostile"})
    assert answer.status_code == 500
    message = answer.json()["error"]["message"]
    assert part in message and "(request hostile)" in message


@pytest.mark.parametrize(("body", "part"), FAILED)
def test_what_fails_in_a_stream_is_its_last_event(http, bystander, body, part):
    answer = http.post("/v1/completions", json=body | {"stream": True})
    *_, last = (line for line in answer.iter_lines() if line)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert part in error["message"] and error["type"] == "server_error"


def test_a_chat_fails_in_the_same_way(http, bystander):
    body = {
        "messages": [{"role": "user", "content": "She said"}],
        "max_tokens": 5,
        "logit_bias": {str(POISON): 100},
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 500 and "NaN in step 2" in answer.json()["error"]["message"]
    answer = http.post("/v1/chat/completions", json=body | {"stream": True})
    *_, last = (line for line in answer.iter_lines() if line)
    assert "NaN in step 2" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_message_of_anthropics_api_fails_in_its_form(http, bystander):
    poison = http.post("/detokenize", json={"tokens": [POISON]}).json()["prompt"]
    body = {"messages": [{"role": "user", "content": f"He had a{poison}"}], "max_tokens": 5}
    answer = http.post("/v1/messages", json=body, headers={"X-Request-Id": "hostile"})
    found = answer.json()
    assert answer.status_code == 500 and found["error"]["type"] == "api_error"
    assert "NaN in step 1" in found["error"]["message"] and found["request_id"] == "hostile"
    answer = http.post("/v1/messages", json=body | {"stream": True})
    name, data = answer.text.strip().split("\n\n")[-1].split("\n")
    found = json.loads(data.removeprefix("data: "))
    assert name == "event: error" and found["type"] == "error"
    assert "NaN in step 1" in found["error"]["message"]


def test_a_response_fails_in_the_same_way_and_is_not_stored(http, bystander):
    body = {"input": "She said", "max_output_tokens": 5, "logit_bias": {str(POISON): 100}}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 500 and "NaN in step 2" in answer.json()["error"]["message"]
    answer = http.post("/v1/responses", json=body | {"stream": True})
    *_, error, failed, done, _ = answer.text.split("\n\n")
    error, failed = (json.loads(each.split("data: ")[1]) for each in (error, failed))
    assert (error["type"], failed["type"], done) == ("error", "response.failed", "data: [DONE]")
    assert error["sequence_number"] + 1 == failed["sequence_number"]
    assert "NaN in step 2" in error["message"] == failed["response"]["error"]["message"]
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert http.get(f"/v1/responses/{failed['response']['id']}").status_code == 404


@pytest.mark.rotating
@linux
def test_a_stream_goes_on_while_the_model_is_compiled_for_the_first_embeddings(server):
    """The first test here that asks this server for embeddings."""
    answer = beside_a_stream(server, "/v1/embeddings", json.dumps({"input": "Once"}).encode())
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"][0]["embedding"]) == 256


def test_an_embedding_that_is_nan_is_a_500_and_another_is_not(http, bystander):
    answer = http.post(
        "/v1/embeddings", json={"input": [[5, 6], [5, POISON]]}, headers={"X-Request-Id": "hostile"}
    )
    message = answer.json()["error"]["message"]
    assert (
        answer.status_code == 500
        and "hidden states that are NaN" in message
        and "(request hostile)" in message
    )
    assert http.post("/v1/embeddings", json={"input": [[5, 6]]}).status_code == 200


def test_the_engine_is_the_one_that_was_started_and_the_log_names_the_requests(server, http):
    assert http.get("/health").status_code == 200
    assert len([line for line in server.lines if "engine" in line and "starting" in line]) == 1
    answer = http.post(
        "/v1/completions", json=asked(prompt=[5, POISON]), headers={"X-Request-Id": "named"}
    )
    assert answer.status_code == 500
    until = time.monotonic() + 30  # the log comes through a pipe
    while not any("request named failed" in line and "NaN" in line for line in server.lines):
        assert time.monotonic() < until, "no line of the log names the request"
        time.sleep(0.05)


# Requests that used to delay all others

# Each of these used to block all streams for 3 to 200 seconds. The limit allows for a busy machine:
# bench/bystander.py measures milliseconds.
LIMIT_SECONDS = 3.0
FROZE = [
    "lark grammar of 2 MB",
    "lark grammar of 200 kB",
    "regex (a{1000}){1000}",
    "regex (a{1000}){300}",
    "regex slow after 200 letters",
    "grammar of a chain of rules",
    "prompt of 10 MB",
    "message of 10 MB",
    "input of 80,000 parts",
    "message of 16,000 blocks",
    "tokenize 10 MB",
    "prompt of 5,000,000 token ids",
    "stop: 900,000 texts",
    "n=128, logprobs=20",
    "body of 5,000,000 lists",
    "body of 500,000 unknown fields",
]
STREAM = {
    "prompt": "She looked at him",
    "max_tokens": 1900,
    "ignore_eos": True,
    "temperature": 0,
    "logit_bias": {POISON: -100},
    "stream": True,
}


@pytest.fixture(scope="module")
def demo_server():
    with serving("--grammar-seconds", 1, "--max-body-bytes", 32 * 2**20) as found:
        yield found


class Stream(threading.Thread):
    """Streams until `stop` is set; returns the arrival times of the tokens."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.times, self.stopped = url, [], False
        self.start()

    def run(self):
        while not self.stopped:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=STREAM, timeout=60
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        assert "error" not in line
                        self.times.append(time.monotonic())
                    if self.stopped:
                        break

    def wait_for(self, count):
        until = time.monotonic() + 60
        more = len(self.times) + count
        while len(self.times) < more:
            assert time.monotonic() < until and self.is_alive(), "the stream stands still"
            time.sleep(0.01)


@pytest.mark.covering
@linux
@pytest.mark.parametrize("name", FROZE)
def test_a_stream_goes_on_while_another_request_asks_for_too_much(demo_server, name):
    answer = beside_a_stream(demo_server, HOSTILE[name][0], HOSTILE[name][1]())
    # Long texts that a grammar forces cost no more than others.
    assert answer.status_code == (200 if name.startswith("regex") else 400), answer.text
    assert "choices" in answer.json() or answer.json()["error"]["message"]


def beside_a_stream(server, path, body):
    """The response to a request; fails if another stream had a long gap during it."""
    stream = Stream(server.url)
    stream.wait_for(5)
    began = time.monotonic()
    answer = httpx.post(
        server.url + path,
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=120,
    )
    ended = time.monotonic()
    stream.wait_for(5)
    stream.stopped = True
    stream.join()
    meanwhile = [began, *[at for at in stream.times if at > began]]
    longest = max(after - before for before, after in pairwise(meanwhile))
    assert longest < LIMIT_SECONDS, (
        f"{longest:.1f} s without a token, and the request took {ended - began:.1f} s"
    )
    return answer


@pytest.mark.rotating
@linux
def test_fifteen_grammars_take_bounded_memory(demo_server):
    before = demo_server.memory(demo_server.engine_pid)
    with httpx.Client(base_url=demo_server.url, timeout=120) as client:
        for number in range(15):
            body = {
                "prompt": "Once",
                "max_tokens": 1,
                "guided_regex": f"(.*)a(.{{1,{240 + number}}})b(.{{1,300}})c",
            }
            assert client.post("/v1/completions", json=body).status_code in (200, 400)
    assert demo_server.memory(demo_server.engine_pid) - before < 175 * 2**20


@pytest.mark.rotating
@linux
def test_memory_of_large_bodies_goes_back_to_the_system(demo_server):
    before = demo_server.memory(demo_server.process.pid)
    body = json.dumps({"prompt": "She looked at him. " * 1_500_000, "max_tokens": 1}).encode()
    with httpx.Client(base_url=demo_server.url, timeout=120) as client:
        for _ in range(6):
            answer = client.post(
                "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 400
    until = time.monotonic() + 30
    while demo_server.memory(demo_server.process.pid) - before > 100 * 2**20:
        assert time.monotonic() < until, (
            f"{(demo_server.memory(demo_server.process.pid) - before) >> 20} MiB are kept"
        )
        time.sleep(0.5)
