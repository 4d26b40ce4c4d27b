"""The server's lifecycle: an engine that dies or stops responding, restarts, and shutdown."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402

from atomc.runtime.server.engines.supervisor import backoff  # noqa: E402
from atomc.runtime.server.http.deadline import ALARM_SECONDS, CLOSE_SECONDS  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("server lifecycle"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 4}
EXIT_SECONDS = 60  # only a server that hangs takes this long, even on a busy machine
CHAT = {"messages": [{"role": "user", "content": "x"}]}
ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    + 3 * "{% endfor %}"
)


def end_of_stream(server, after_first):
    """The last line of a stream; calls after_first() after the first line."""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=60
    ) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        after_first()
        *_, last = lines
    return json.loads(last.removeprefix("data: "))


def kill_engine(server):
    """Kills the current engine process, as soon as the log names it."""

    def running():
        pid = (server.engine_pid, *map(int, server.all_of(r"serves again, as process (\d+)")))[-1]
        return pid if os.path.exists(f"/proc/{pid}") else None

    os.kill(until(running), signal.SIGKILL)


def health(server):
    try:
        return httpx.get(f"{server.url}/health", timeout=60)
    except httpx.TransportError:
        return None


def until(found, seconds=120):
    """Waits until found() is true; returns its value."""
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end, f"not in {seconds} s"
        time.sleep(0.05)
    return value


@pytest.mark.rotating
def test_a_server_whose_engine_dies_tells_its_clients_and_ends_with_1():
    with serving() as server:
        error = end_of_stream(server, lambda: kill_engine(server))["error"]
        assert error["code"] == "engine_dead" and "killed by signal 9" in error["message"]
        assert server.process.wait(EXIT_SECONDS) == 1
        assert "the engine's process was killed by signal 9; the server ends" in server.log
        assert "Traceback" not in server.log


RECORD_FREEZES = """
import gc, os
freeze = gc.freeze
def record():
    freeze()
    with open(os.environ["FREEZES"], "a") as file:
        file.write(f"{os.getpid()}\\n")
gc.freeze = record
"""


@pytest.mark.rotating
def test_the_heap_of_a_started_server_is_left_out_of_collections(tmp_path, monkeypatch):
    """One collection of the libraries' objects stops every stream for 60 ms."""
    (tmp_path / "sitecustomize.py").write_text(RECORD_FREEZES)
    monkeypatch.setenv("FREEZES", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with serving() as server:
        pids = {int(line) for line in (tmp_path / "pids").read_text().split()}
        assert {server.process.pid, server.engine_pid} <= pids


@pytest.mark.rotating
def test_a_dead_engine_is_restarted_a_few_times_and_then_the_server_ends():
    with serving("--restart-engine", 2) as server:
        error = end_of_stream(server, lambda: kill_engine(server))["error"]
        assert error["code"] == "engine_restarting"
        assert error["message"].startswith("the engine is being restarted (attempt 1 of 2)")
        sick = health(server)
        assert sick.status_code == 503 and "(attempt 1 of 2)" in sick.json()["error"]["message"]
        refused = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_restarting"
        assert int(refused.headers["retry-after"]) >= 1

        until(lambda: health(server).status_code == 200)
        answer = httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert (
            'engine_restarts_total{engine="0",model_name="atomc-demo"} 1.0'
            in httpx.get(f"{server.url}/metrics", timeout=60).text
        )

        kill_engine(server)
        until(lambda: "(attempt 2 of 2)" in health(server).text)
        until(lambda: health(server).status_code == 200)
        kill_engine(server)
        assert server.process.wait(EXIT_SECONDS) == 1
        assert "(after 2 restarts); the server ends" in server.log and "Traceback" not in server.log


@pytest.mark.rotating
def test_an_unresponsive_engine_is_killed_and_counts_as_dead():
    with serving("--engine-patience", 1, "--engine-timeout", 3) as server:
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert server.process.wait(EXIT_SECONDS) == 1
        assert "(--engine-timeout) and was killed; the server ends" in server.log


@pytest.mark.rotating
def test_a_signal_ends_a_server_whose_engine_is_being_restarted():
    with serving("--restart-engine", 9) as server:
        kill_engine(server)
        server.wait_for("attempt 1 of 9")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(EXIT_SECONDS) == 0
        assert "Traceback" not in server.log


@pytest.mark.rotating
def test_sigterm_ends_a_server_whose_chat_template_does_not_end(tmp_path):
    template = tmp_path / "endless.jinja"
    template.write_text(ENDLESS)
    with (
        serving("--drain-seconds", 1, "--chat-template", template) as server,
        ThreadPoolExecutor() as pool,
    ):

        def threads():
            return len(os.listdir(f"/proc/{server.process.pid}/task"))

        before = threads()
        answers = [
            pool.submit(httpx.post, f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
            for _ in range(2)
        ]
        until(lambda: threads() >= before + 2)  # both are being rendered
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        status = server.process.wait(EXIT_SECONDS)
        # --drain-seconds plus 5; the rest allows for a busy machine.
        assert time.monotonic() - began < 1 + 5 + 10
        # SIGALRM, without responses, if the machine is so busy that the server's thread runs too
        # late.
        assert status in (0, -signal.SIGALRM)
        if status == 0:
            assert {answer.result().json()["error"]["code"] for answer in answers} == {
                "shutting_down"
            }
        assert "Traceback" not in server.log


@pytest.mark.rotating
def test_sigterm_does_not_wait_for_a_client_that_does_not_read():
    with serving("--drain-seconds", 1) as server:
        body = LONG | {"n": 8, "logprobs": 20, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(EXIT_SECONDS) == 0
        assert "Traceback" not in server.log


DEADLINE = """
import sys, threading, time
from atomc.runtime.server.http.deadline import Deadline
deadline = Deadline(lambda: print("last", flush=True))
if sys.argv[1] == "stuck":
    threading.Thread(target=time.sleep, args=(600,)).start()
deadline.set(600, 3)
deadline.set(0.2, 5)
if sys.argv[1] == "is over":
    deadline.cancel()
    time.sleep(1)
if sys.argv[1] == "holds the interpreter":
    print(9 ** 9 ** 9)
"""


@pytest.mark.rotating
@pytest.mark.parametrize(
    "what, status, said",
    [
        ("ends", 0, ""),
        ("is over", 0, ""),
        ("stuck", 5, "last\n"),
        ("holds the interpreter", -signal.SIGALRM, ""),
    ],
)
def test_the_earliest_deadline_exits_a_process_that_does_not_end(what, status, said):
    ended = subprocess.run(
        [sys.executable, "-c", DEADLINE, what], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (status, said)


def test_attempts_wait_longer_and_longer():
    assert [backoff(attempt) for attempt in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert CLOSE_SECONDS + ALARM_SECONDS < 5
