"""A server of two ranks: one that dies or hangs under load ends all streams, and is restarted."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402
from test_ranks import SOON, is_alive  # noqa: E402
from test_server_lifecycle import health, until  # noqa: E402
from test_server_limits import LONG, SHORT, at_once, streamed  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
LONG_STREAMS, SHORT_STREAMS = 50, 10


@pytest.fixture(scope="module")
def server():
    """The last test kills it."""
    with serving("--tp", 2, "--restart-engine", 3) as found:
        assert "2 ranks: 0 is process" in found.log
        yield found


def rank_1(server):
    """The process of rank 1 that started last."""
    engines = {server.engine_pid, *map(int, server.all_of(r"serves again, as process (\d+)"))}
    return max(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if b"ranks.rank_process" in (path.parent / "cmdline").read_bytes()
        and int(path.read_text().rpartition(")")[2].split()[1]) in engines
    )


def text(lines):
    """The text of a stream that has ended."""
    *chunks, last = lines
    assert last == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["text"] for line in chunks)


def under_streams(server, happens):
    """Calls happens() when all long streams have begun and all short ones have ended: the lines of
    the long ones, the seconds from the call to the end of each, and the lines of the short ones.
    """
    done, began = 0, 0.0

    async def count():
        nonlocal done, began
        done += 1
        if done == LONG_STREAMS + SHORT_STREAMS:
            began = time.monotonic()
            happens()

    async def long(client):
        lines = await streamed(client, LONG, after_first=count)
        return lines, time.monotonic() - began

    async def short(client):
        lines = await streamed(client, SHORT)
        await count()
        return lines

    found = at_once(server.url, *[long] * LONG_STREAMS, *[short] * SHORT_STREAMS)
    return *zip(*found[:LONG_STREAMS], strict=True), found[LONG_STREAMS:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(signal.SIGKILL, "was killed by signal 9", id="killed"),
        pytest.param(signal.SIGSTOP, "has been silent for", id="stopped"),
    ],
)
def test_50_streams_end_soon_after_a_rank_fails_and_the_group_serves_again(server, number, reason):
    failed = rank_1(server)
    cut, seconds, complete = under_streams(server, lambda: os.kill(failed, number))
    message = f"rank 1 (process {failed}) {reason}"
    sick = health(server)
    assert sick.status_code == 503 and message in sick.json()["error"]["message"]
    assert max(seconds) < SOON
    for lines in cut:
        *chunks, last = map(json.loads, lines)
        assert not any("error" in chunk for chunk in chunks)
        assert last["error"]["code"] == "engine_restarting" and message in last["error"]["message"]
    until(lambda: health(server).status_code == 200)
    assert not is_alive(failed)
    again = at_once(server.url, *[lambda client: streamed(client, SHORT)] * LONG_STREAMS)
    (same,) = {text(lines) for lines in [*complete, *again]}
    assert same and "Traceback" not in server.log


@pytest.mark.slow
def test_a_rank_that_hangs_without_requests_is_noticed_and_none_outlives_the_server(server):
    stopped = rank_1(server)
    began = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    sick = until(lambda: (answer := health(server)).status_code == 503 and answer)
    assert time.monotonic() - began < SOON
    assert f"rank 1 (process {stopped}) has been silent" in sick.json()["error"]["message"]
    until(lambda: health(server).status_code == 200)

    last = rank_1(server)
    server.process.kill()
    until(lambda: not any(is_alive(pid) for pid in (stopped, last)), SOON)
