"""The server under load and failures: a dead engine, a full queue, slow readers, many clients,
shutdown.
"""

import asyncio
import fcntl
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from itertools import islice

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from processes import wait_until  # noqa: E402
from serving import Server, serving  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("server limits"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
# With the model, because some are sent without httpx.
SHORT = {"model": "atomc-demo", "prompt": "Once", "max_tokens": 4, "ignore_eos": True}
SHORT["temperature"] = 0
LONG = SHORT | {"max_tokens": 2000}


@pytest.fixture(scope="module")
def small():
    """A server with few slots whose engine the last test kills; it restarts once."""
    with serving(
        "--max-num-seqs", 8, "--max-queue", 64, "--engine-patience", 1, "--restart-engine", 1
    ) as server:
        yield server


@pytest.fixture(scope="module")
def server(small):
    """A second server, for tests after that."""
    with serving("--drain-seconds", 4) as found:
        yield found


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def enough_files(count):
    """Raises the limit of open files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count, hard)), hard))


def at_once(url, *jobs):
    """The results of the coroutines that the jobs create with one client, run concurrently."""

    async def run():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(job(client) for job in jobs))

    return asyncio.run(run())


async def streamed(client, body, after_first=None):
    """The data lines of a stream; calls after_first after the first one."""
    lines = []
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line:
                lines.append(line.removeprefix("data: "))
                if after_first is not None and len(lines) == 1:
                    await after_first()
    return lines


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.rotating
def test_a_full_queue_is_a_503_that_says_when_to_come_again(small):
    running, waiting, asked = 8, 64, 120

    async def ask():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=small.url, timeout=60, limits=limits) as client:
            answers = [
                asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(asked)
            ]
            first = [
                await each
                for each in islice(asyncio.as_completed(answers), asked - running - waiting)
            ]
            for answer in answers:
                answer.cancel()
            return first

    for answer in asyncio.run(ask()):
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
    # All other clients have disconnected and hold no memory.
    assert httpx.post(f"{small.url}/v1/completions", json=SHORT, timeout=60).status_code == 200


@pytest.mark.rotating
def test_a_log_that_nothing_reads_blocks_nothing(small):
    fcntl.fcntl(small.process.stderr, fcntl.F_SETPIPE_SZ, 4096)
    before, lines = 120, len(small.lines)
    small.reading.clear()
    with httpx.Client(base_url=small.url, timeout=30) as client:
        for _ in range(before):
            assert client.post("/v1/completions", json=SHORT | {"max_tokens": 1}).is_success
        assert client.get("/health").is_success and len(small.lines) <= lines + 1
    small.reading.set()
    wait_until(lambda: len(small.lines) >= lines + before)


@pytest.mark.rotating
def test_an_engine_that_does_not_answer_turns_health_red_until_it_does(small):
    def health():
        return httpx.get(f"{small.url}/health", timeout=60).status_code

    os.kill(small.engine_pid, signal.SIGSTOP)
    try:
        wait_until(lambda: health() == 503)
    finally:
        os.kill(small.engine_pid, signal.SIGCONT)
    wait_until(lambda: health() == 200)


@pytest.mark.rotating
def test_killing_the_engine_ends_50_streams_with_an_error_and_turns_health_red(small):
    begun = 0

    async def kill():
        nonlocal begun
        begun += 1
        if begun == 8:
            os.kill(small.engine_pid, signal.SIGKILL)

    async def stream(client):
        return await streamed(client, LONG, after_first=kill)

    found = at_once(small.url, *[stream] * 50)
    for lines in found:
        error = json.loads(lines[-1])["error"]
        assert error["code"] == "engine_restarting" and "killed by signal 9" in error["message"]
    assert sum(len(lines) > 1 for lines in found) >= 8
    for path in ("/health", "/ready"):
        assert httpx.get(small.url + path).status_code == 503
    answer = httpx.post(f"{small.url}/v1/completions", json=SHORT)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_restarting"
    assert (
        'atomc:up{engine="0",model_name="atomc-demo"} 0.0' in httpx.get(f"{small.url}/metrics").text
    )
    assert "Traceback" not in small.log


@pytest.mark.rotating
def test_a_restart_serves_again(server):
    assert (
        httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).json()["usage"][
            "completion_tokens"
        ]
        == 4
    )
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.rotating
def test_tools_of_a_model_whose_way_is_not_known_are_refused_with_what_to_do(server):
    function = {"name": "weather", "parameters": {"type": "object"}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert (
        answer.status_code == 400
        and "--tool-call-parser, one of hermes" in answer.json()["error"]["message"]
    )


@pytest.mark.rotating
def test_a_page_of_another_site_reads_and_changes_nothing(server):
    for method, path, headers in (
        ("GET", "/version", {"Host": "page.example"}),
        ("POST", "/reset_prefix_cache", {"Origin": "https://page.example"}),
        ("POST", "/sleep", {"Origin": "null"}),
    ):
        assert httpx.request(method, server.url + path, headers=headers).status_code == 403
    headers = {"Origin": server.url}
    assert httpx.post(f"{server.url}/reset_prefix_cache", headers=headers).status_code == 200


@pytest.mark.rotating
def test_a_thousand_connections_are_served_in_bounded_memory(server):
    before = [server.memory(pid) for pid in (server.process.pid, server.engine_pid)]
    body = json.dumps(SHORT).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    asked = "\r\n".join([*head, "", ""]).encode() + body

    async def run():
        async with asyncio.timeout(60):
            opened = [await asyncio.open_connection(*address(server)) for _ in range(1000)]
            for _, writer in opened:
                writer.write(asked)
            return [await reader.read() for reader, _ in opened]

    enough_files(1200)
    answers = asyncio.run(run())
    assert {answer.partition(b"\r\n")[0] for answer in answers} == {b"HTTP/1.1 200 OK"}
    assert (
        len(
            {
                json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
                for answer in answers
            }
        )
        == 1
    )
    after = [server.memory(pid) for pid in (server.process.pid, server.engine_pid)]
    assert after[0] - before[0] < 100 * 2**20 and after[1] - before[1] < 200 * 2**20


@pytest.mark.rotating
def test_a_slow_reader_does_not_delay_others_and_gets_all_its_output(server):
    body = json.dumps({**LONG, "max_tokens": 500, "n": 8, "logprobs": 20, "stream": True}).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(address(server))
        reader.sendall("\r\n".join([*head, "", ""]).encode() + body)
        before = server.memory(server.process.pid)
        wait_until(
            lambda: (
                "atomc:num_requests_running" in httpx.get(f"{server.url}/metrics", timeout=60).text
            )
        )
        for _ in range(5):
            assert (
                httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code
                == 200
            )

        def idle():
            text = httpx.get(f"{server.url}/metrics", timeout=60).text
            return 'atomc:num_requests_running{engine="0",model_name="atomc-demo"} 0.0' in text

        wait_until(idle, 120)  # the engine has finished it, and no byte has been read
        assert server.memory(server.process.pid) - before < 100 * 2**20
        reader.settimeout(60)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += reader.recv(2**20)
    assert len(answer) > 3_000_000  # more than the system buffers for a connection
    assert answer.count(b'"finish_reason":"length"') == 8 and b"data: [DONE]" in answer


@pytest.mark.rotating
def test_sigterm_lets_short_answers_finish_and_cuts_long_ones_with_an_error(server):
    async def end():
        server.process.send_signal(signal.SIGTERM)

    async def short(client):
        return await streamed(client, {**SHORT, "max_tokens": 12}, after_first=end)

    async def long(client):
        return await streamed(client, {**LONG, "n": 32})

    async def late(client):
        while server.process.poll() is None:
            try:
                async with asyncio.timeout(1):
                    _, writer = await asyncio.open_connection(*address(server))
                writer.close()
            except OSError:
                return "refused"
            await asyncio.sleep(0.02)

    engine_pid = server.engine_pid
    finished, cut, refused = at_once(server.url, short, long, late)
    assert finished[-1] == "[DONE]" and refused == "refused"
    assert json.loads(cut[-1])["error"]["code"] == "shutting_down"
    assert server.process.wait(20) == 0
    assert not alive(engine_pid) and "Traceback" not in server.log


@pytest.mark.rotating
def test_an_engine_does_not_outlive_its_server():
    server = Server(
        subprocess.Popen(
            [sys.executable, "-m", "atomc", "serve", "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    server.lines.append(server.process.stderr.readline())
    engine_pid = server.engine_pid
    assert alive(engine_pid)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not alive(engine_pid))
