"""`atomc bench`: the requests it sends, their schedule, and the metrics it computes."""

import asyncio
import contextlib
import io
import json
import re
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

from atomc.cli import main
from atomc.runtime.bench import load
from atomc.runtime.bench.client import Server
from atomc.runtime.bench.datasets import (
    FIRST_ID,
    LAST_ID,
    SampleRequest,
    random_requests,
    requests_from_file,
)
from atomc.runtime.bench.metrics import RequestTiming, distribution, format_summary, summarize

FIRST, GAP, TOKENS = 0.06, 0.02, 4
KEY = "secret"


class Handler(BaseHTTPRequestHandler):
    """An OpenAI-compatible server with a fixed time per token that records its requests."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.whole(200, {"object": "list", "data": [{"id": "theirs"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(
                body | {"path": self.path, "key": self.headers.get("Authorization")}
            )
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        if self.server.way == "refuse" and len(self.server.asked) > 1:
            self.over()
            self.whole(503, {"error": {"message": "too much\nto do", "type": "overloaded"}})
        else:
            self.stream("messages" in body)

    def over(self):
        """Called before [DONE] is sent, because the client may send its next request right after
        it.
        """
        with self.server.lock:
            self.server.now -= 1

    def stream(self, chat):
        way = self.server.way
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(TOKENS):
            time.sleep(GAP if number else FIRST)
            if way == "break" and number == 2:
                self.over()
                self.close_connection = True
                return
            if way == "fail" and number == 2:
                self.event({"error": {"message": "the engine died"}})
                break
            self.event({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
        if way != "no usage":
            self.event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": TOKENS}})
        self.over()
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, data):
        # In two chunks, split in the middle of a line.
        line = f"data: {json.dumps(data)}\n\n".encode()
        self.chunk(line[:9])
        self.chunk(line[9:])

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def whole(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def theirs():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.lock, server.now, server.most, server.way = [], threading.Lock(), 0, 0, ""
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(*argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(part) for part in argv]) == 0
    return out.getvalue()


def sent(server, *samples, **how):
    """The timings of these requests; fails after a minute."""
    coroutine = load.run(Server(server.url, "theirs"), samples, progress=False, **how)
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_figures_are_those_of_what_the_server_did(theirs, tmp_path):
    file = tmp_path / "run.json"
    printed = run(
        "bench",
        "serve",
        "--base-url",
        theirs.url,
        "--num-prompts",
        6,
        "--max-concurrency",
        2,
        "--input-len",
        5,
        "--output-len",
        TOKENS,
        "--json",
        file,
        "-q",
        "--api-key",
        KEY,
    )
    found = json.loads(file.read_text())
    told = found["figures"]
    assert (told["completed"], told["failed"], told["input_tokens"], told["output_tokens"]) == (
        6,
        0,
        30,
        24,
    )
    assert told["most_at_once"] == theirs.most == 2
    # On a busy machine a late read shortens the next gap, so only sums of times are checked.
    assert told["ttft_ms"]["p50"] >= 1e3 * FIRST
    assert told["e2e_ms"]["p50"] >= 1e3 * (FIRST + (TOKENS - 1) * GAP)
    mean = {name: told[f"{name}_ms"]["mean"] for name in ("ttft", "tpot", "itl", "e2e")}
    assert mean["ttft"] + (TOKENS - 1) * mean["tpot"] == pytest.approx(mean["e2e"])
    assert 0 < mean["itl"] <= mean["tpot"]
    assert mean["e2e"] * 6 <= 1e3 * told["seconds"] * 2  # two at a time
    assert told["output_tokens_per_second"] == pytest.approx(24 / told["seconds"])
    assert len(found["requests"]) == 6
    assert "theirs: 6 requests, 2 at a time" in printed and "TTFT" in printed
    assert KEY not in file.read_text()


def test_what_is_sent_is_what_was_asked_for(theirs):
    run(
        "bench",
        "serve",
        "--base-url",
        f"{theirs.url}/v1/",
        "--num-prompts",
        3,
        "--input-len",
        7,
        "--prefix-len",
        2,
        "--output-len",
        4,
        "--api-key",
        KEY,
        "--extra",
        "top_k=3",
        "-q",
    )
    first, *asked = theirs.asked
    assert first["max_tokens"] == 1
    assert [each["path"] for each in asked] == ["/v1/completions"] * 3
    assert {each["key"] for each in theirs.asked} == {f"Bearer {KEY}"}
    assert all(len(each["prompt"]) == 9 and each["max_tokens"] == 4 for each in asked)
    assert len({tuple(each["prompt"]) for each in asked}) == 3
    assert len({tuple(each["prompt"][:2]) for each in asked}) == 1
    fields = ("model", "temperature", "ignore_eos", "top_k", "stream", "stream_options")
    assert [asked[0][name] for name in fields] == [
        "theirs",
        0.0,
        True,
        3,
        True,
        {"include_usage": True},
    ]


def test_messages_of_a_file_go_to_the_chat_endpoint(theirs, tmp_path):
    file = tmp_path / "asks.jsonl"
    file.write_text(
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}\n\n{"prompt": "She"}\n'
    )
    run(
        "bench",
        "serve",
        "--base-url",
        theirs.url,
        "--dataset",
        file,
        "--num-prompts",
        2,
        "--respect-eos",
        "-q",
    )
    asked = {each["path"]: each for each in theirs.asked[1:]}
    assert asked["/v1/chat/completions"]["messages"] == [{"role": "user", "content": "Hi"}]
    assert asked["/v1/chat/completions"]["max_tokens"] == 3
    assert asked["/v1/completions"]["prompt"] == "She"
    assert "ignore_eos" not in asked["/v1/completions"]


def test_the_first_part_of_a_chat_is_no_token(theirs):
    (timed,) = sent(theirs, SampleRequest([{"role": "user", "content": "Hi"}], TOKENS))
    assert len(timed.times) == TOKENS
    assert timed.ttft >= FIRST


def test_without_usage_the_pieces_are_counted(theirs):
    theirs.way = "no usage"
    (timed,) = sent(theirs, SampleRequest("Hi", TOKENS))
    assert (timed.error, timed.output_tokens) == (None, TOKENS)


@pytest.mark.parametrize(
    "way, error",
    [("break", "IncompleteReadError"), ("fail", "the engine died")],
)
def test_a_failing_first_request_is_reported(theirs, way, error):
    theirs.way = way
    with pytest.raises(ValueError, match=f"the first request to .* failed: .*{error}"):
        sent(theirs, SampleRequest("Hi", TOKENS))


def test_requests_that_fail_are_counted_with_their_errors_and_not_timed(theirs):
    theirs.way = "refuse"
    found = summarize(sent(theirs, *[SampleRequest("Hi", TOKENS)] * 3))
    assert (found["completed"], found["failed"]) == (0, 3)
    assert found["errors"] == {"status 503: too much to do": 3}
    assert found["ttft_ms"] == {}
    assert "failed x3: status 503: too much to do" in format_summary(found)


def test_requests_come_at_the_rate_that_was_asked_for(theirs):
    due = load.arrivals(8, 40.0, seed=3)
    timed = sent(theirs, *[SampleRequest("Hi", TOKENS)] * 8, rate=40.0, seed=3)
    assert all(each.start >= planned for each, planned in zip(timed, due, strict=True)), (
        timed,
        due,
    )
    # Requests overlap: one takes five times as long as the mean gap between two.
    assert theirs.most > 2


def test_arrivals_are_a_poisson_process():
    times = load.arrivals(20_000, 50.0, seed=0)
    gaps = sorted(after - before for before, after in pairwise(times))
    assert times[0] == 0.0
    assert sum(gaps) / len(gaps) == pytest.approx(0.02, rel=0.03)
    # The median of an exponential distribution is ln 2 of its mean.
    assert statistics.median(gaps) == pytest.approx(0.02 * 0.6931, rel=0.03)
    assert load.arrivals(3, float("inf"), seed=0) == [0.0, 0.0, 0.0]


@pytest.fixture
def wrong(capsys):
    """The one line that a failing command prints."""

    def line(*argv):
        with contextlib.suppress(SystemExit):
            assert main([str(part) for part in argv]) == 2
        (told,) = capsys.readouterr().err.splitlines()
        return told

    return line


def test_what_a_user_gets_wrong_is_one_line(wrong, theirs, tmp_path):
    serve = ("bench", "serve", "-q", "--base-url", theirs.url)
    assert "cannot connect to http://127.0.0.1:1:" in wrong(
        "bench", "serve", "--base-url", "http://127.0.0.1:1"
    )
    assert "'ftp://x/v1/models' is not an HTTP URL" in wrong(
        "bench", "serve", "--base-url", "ftp://x"
    )
    assert "the request rate is 0.0, expected a number above 0" in wrong(
        *serve, "--request-rate", 0
    )
    assert "the spread of lengths is 2.0" in wrong(*serve, "--spread", 2)
    assert "'0': expected a number of at least 1" in wrong(*serve, "--num-prompts", 0)
    assert "No such file" in wrong(*serve, "--dataset", tmp_path / "gone.txt")
    (tmp_path / "bad.jsonl").write_text('{"prompt": 3}\n')
    assert "bad.jsonl:1: expected an object with prompt" in wrong(
        *serve, "--dataset", tmp_path / "bad.jsonl"
    )
    (tmp_path / "empty.txt").write_text("\n")
    assert "empty.txt has no prompt" in wrong(*serve, "--dataset", tmp_path / "empty.txt")


# Prompts and metrics


def test_random_prompts_repeat_for_a_seed_and_have_the_lengths_asked_for():
    samples = random_requests(200, 20, 10, spread=0.5, seed=1)
    assert (
        samples
        == random_requests(200, 20, 10, spread=0.5, seed=1)
        != random_requests(200, 20, 10, spread=0.5, seed=2)
    )
    assert {len(sample.prompt) for sample in samples} == set(range(10, 31))
    assert {sample.max_tokens for sample in samples} == set(range(5, 16))
    assert all(FIRST_ID <= token < LAST_ID for sample in samples for token in sample.prompt)


def test_prompts_of_a_file_are_repeated_if_they_are_too_few(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    samples = requests_from_file(tmp_path / "lines.txt", 5, 7)
    assert sorted({sample.prompt for sample in samples}) == ["one", "two"]
    assert len(samples) == 5 and {sample.max_tokens for sample in samples} == {7}


def test_percentiles_are_interpolated_and_in_milliseconds():
    found = distribution([4.0, 1.0, 2.0])
    assert found == pytest.approx(
        {"mean": 7000 / 3, "p50": 2000, "p90": 3600, "p95": 3800, "p99": 3960, "max": 4000}
    )
    assert distribution([0.003])["p99"] == pytest.approx(3.0) and distribution([]) == {}


def test_figures_of_known_times():
    one = RequestTiming(0.0, [1.0, 1.5, 2.0], 2.0, input_tokens=10, output_tokens=3)
    two = RequestTiming(1.0, [3.0], 4.0, input_tokens=20, output_tokens=1)
    found = summarize([one, two, RequestTiming(0.0, end=0.5, error="no")])
    assert (found["seconds"], found["most_at_once"], found["failed"]) == (4.0, 2, 1)
    assert (found["output_tokens_per_second"], found["total_tokens_per_second"]) == (1.0, 8.5)
    assert (found["ttft_ms"]["mean"], found["tpot_ms"]["mean"], found["itl_ms"]["p50"]) == (
        1500.0,
        500.0,
        500.0,
    )
    assert found["e2e_ms"]["max"] == 3000.0


@pytest.mark.rotating
@pytest.mark.parametrize("ending, begins", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_run_is_drawn(theirs, tmp_path, ending, begins):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"run.{ending}"
    run("bench", "serve", "--base-url", theirs.url, "--num-prompts", 4, "-q", "--plot", file)
    assert file.read_bytes().startswith(begins)
    assert file.stat().st_size > 10_000


# Without a server


SMALL = ("--input-len", 12, "--output-len", 3, "-q", "--options", "glue=eager")


@pytest.mark.rotating
def test_latency_runs_batch_after_batch(tmp_path):
    run("bench", "latency", "--batch-size", 2, "--repeat", 2, *SMALL, "--json", tmp_path / "l.json")
    found = json.loads((tmp_path / "l.json").read_text())
    assert (found["figures"]["completed"], found["figures"]["most_at_once"]) == (4, 2)
    assert (found["figures"]["input_tokens"], found["figures"]["output_tokens"]) == (48, 12)
    first, second = found["requests"][0], found["requests"][2]
    assert second["start"] >= first["start"] + first["e2e"]
    assert found["machine"]["torch"]


def test_throughput_runs_all_at_once(tmp_path):
    (tmp_path / "lines.txt").write_text("She looked at him and said\nIt was\n")
    printed = run(
        "bench", "throughput", "--num-prompts", 5, "--dataset", tmp_path / "lines.txt", *SMALL
    )
    assert "5 requests in" in printed and "at most 5 at once" in printed and "15 out" in printed
    assert re.search(r"the device waited for the host \d+\.\d% of the time", printed)


def test_messages_need_a_server(wrong, tmp_path):
    (tmp_path / "asks.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    told = wrong("bench", "throughput", "--dataset", tmp_path / "asks.jsonl", *SMALL)
    assert (
        told == "atomc: a dataset with messages needs a server, which applies the chat template: "
        "atomc bench serve"
    )


@pytest.mark.slow
def test_startup_tells_a_cold_start_from_a_warm_one_and_where_the_seconds_went(tmp_path):
    printed = run(
        "bench",
        "startup",
        "--json",
        tmp_path / "s.json",
        "--options",
        "glue=eager",
        "--max-num-seqs",
        2,
    )
    cold, warm = json.loads((tmp_path / "s.json").read_text())["starts"]
    assert (cold["way"], warm["way"]) == ("cold", "warm")
    parts = {"python", "import", "load", "compile", "allocate", "warm up", "first token", "rest"}
    for start in (cold, warm):
        assert parts <= start["phases"].keys()
        assert sum(start["phases"].values()) == pytest.approx(start["seconds"])
        assert start["phases"]["rest"] < 1.0 < start["seconds"]
    assert printed.splitlines()[0].split() == ["seconds", "cold", "warm"]


@pytest.mark.rotating
def test_a_failed_start_is_reported_with_its_last_line(wrong, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "the engine did not start: " in wrong("bench", "startup", tmp_path, "--limit", 120)
