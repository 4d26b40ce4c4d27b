"""A process that answers connections in forks: limits, cancellation, and a process that is stopped."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from processes import is_running, wait_until

from atomc.runtime.processes.fork_server import ForkServer, serve_forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def respond(connection: socket.socket) -> None:
    """Answer with what was sent; hang, crash or end after some words."""
    with connection.makefile("rb") as file:
        word = file.readline().strip()
        if word == b"hang":
            connection.sendall(b"%d\n" % os.getpid())
            time.sleep(3600)
        if word == b"crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        connection.sendall(word + b"\n")


def start(**settings):
    patience = settings.pop("patience", 10.0)
    return ForkServer(__name__, settings, patience=patience)


def ask(server, word):
    with server.connect() as connection, connection.makefile("rb") as file:
        connection.sendall(word + b"\n")
        return file.read()


@pytest.fixture(scope="module", autouse=True)
def module_path():
    """The processes import this file."""
    with pytest.MonkeyPatch.context() as patch:
        folders = (Path(__file__).parent, Path(__file__).parents[1] / "_support")
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def server(module_path):
    return start()


def test_each_connection_has_its_answer(server):
    assert [ask(server, b"%d" % i) for i in range(3)] == [b"0\n", b"1\n", b"2\n"]


def test_a_signal_that_ends_a_fork_is_named(server):
    assert json.loads(ask(server, b"crash")) == {"signal": signal.SIGSEGV}
    assert ask(server, b"next") == b"next\n"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_closing_a_connection_ends_its_fork(server, is_stopped):
    with server.connect() as connection, connection.makefile("rb") as file:
        connection.sendall(b"hang\n")
        pid = int(file.readline())
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        assert is_running(pid) and ask(server, b"other") == b"other\n"
    wait_until(lambda: not is_running(pid))


def test_a_stopped_process_is_replaced_and_its_forks_go_on():
    server = start(patience=0.5)
    with server.connect() as connection:
        stopped = server._process.pid
        os.kill(stopped, signal.SIGSTOP)
        assert ask(server, b"new") == b"new\n"
        assert not is_running(stopped) and server._process.pid != stopped
        with connection.makefile("rb") as file:
            connection.sendall(b"old\n")
            assert file.read() == b"old\n"


def test_a_process_that_was_killed_is_replaced(server):
    ask(server, b"a")
    os.kill(server._process.pid, signal.SIGKILL)
    assert ask(server, b"a") == b"a\n"


def test_a_process_that_can_serve_nothing_says_why():
    server = start(error="no model")
    for _ in range(2):
        with pytest.raises(ValueError, match="no model"):
            server.connect()


def test_a_process_that_ends_at_once_is_an_error():
    with pytest.raises(RuntimeError, match="test_fork_server accepts no connection"):
        start(ends=True).connect()


def test_the_process_ends_with_its_owner():
    server = start()
    ask(server, b"a")
    pid = server._process.pid
    del server
    wait_until(lambda: not is_running(pid))


if __name__ == "__main__":
    SETTINGS = json.load(sys.stdin)
    if not SETTINGS.get("ends"):
        serve_forks(respond, SETTINGS.get("error"))
