"""A stream goes on while another client asks for as much as one request can ask for."""

import json
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
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from hostile import HOSTILE  # noqa: E402
from serving import serving  # noqa: E402

pytestmark = [pytest.mark.xdist_group("bystanders"),
              pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]  # fmt: skip
# Each of these once held up all streams for 3 to 200 seconds. The limit is for a machine with much else to do:
# bench/bystander.py measures milliseconds.
LIMIT_SECONDS = 3.0
FROZE = ["lark grammar of 2 MB", "lark grammar of 200 kB", "regex (a{1000}){1000}", "regex (a{1000}){300}",
         "regex slow after 200 letters", "grammar of a chain of rules", "prompt of 10 MB", "message of 10 MB",
         "tokenize 10 MB", "prompt of 5,000,000 token ids", "stop: 900,000 texts", "n=128, logprobs=20",
         "body of 5,000,000 lists", "body of 500,000 unknown fields"]  # fmt: skip
STREAM = {"prompt": "She looked at him", "max_tokens": 1900, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server():
    with serving("--grammar-seconds", 1, "--max-body-bytes", 32 * 2**20) as found:
        yield found


class Stream(threading.Thread):
    """Streams until it is told to stop: the times of its tokens."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.times, self.stopped = url, [], False
        self.start()

    def run(self):
        while not self.stopped:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=STREAM, timeout=60) as answer:
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


@pytest.mark.parametrize("name", FROZE)
def test_a_stream_goes_on_while_another_request_asks_for_too_much(server, name):
    answer = beside_a_stream(server, HOSTILE[name][0], HOSTILE[name][1]())
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_a_stream_goes_on_while_the_model_is_compiled_for_the_first_embeddings(server):
    answer = beside_a_stream(server, "/v1/embeddings", json.dumps({"input": "Once"}).encode())
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"][0]["embedding"]) == 256


def beside_a_stream(server, path, body):
    """The answer to a request; fails if a stream had to wait for long meanwhile."""
    stream = Stream(server.url)
    stream.wait_for(5)
    began = time.monotonic()
    answer = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=120)
    ended = time.monotonic()
    stream.wait_for(5)
    stream.stopped = True
    stream.join()
    meanwhile = [began, *[at for at in stream.times if at > began]]
    longest = max(after - before for before, after in pairwise(meanwhile))
    assert longest < LIMIT_SECONDS, f"{longest:.1f} s without a token, and the request took {ended - began:.1f} s"
    return answer


def test_sixty_grammars_take_bounded_memory(server):
    before = server.memory(server.engine_pid)
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for number in range(60):
            body = {"prompt": "Once", "max_tokens": 1, "guided_regex": f"(.*)a(.{{1,{240 + number}}})b(.{{1,300}})c"}
            assert client.post("/v1/completions", json=body).status_code in (200, 400)
    assert server.memory(server.engine_pid) - before < 700 * 2**20


def test_memory_of_large_bodies_goes_back_to_the_system(server):
    before = server.memory(server.process.pid)
    body = json.dumps({"prompt": "She looked at him. " * 1_500_000, "max_tokens": 1}).encode()
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for _ in range(6):
            answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400
    until = time.monotonic() + 30
    while server.memory(server.process.pid) - before > 100 * 2**20:
        assert time.monotonic() < until, f"{(server.memory(server.process.pid) - before) >> 20} MiB are kept"
        time.sleep(0.5)
