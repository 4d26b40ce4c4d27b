"""Runs `atomc serve` as a process, for tests of the server."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

START_SECONDS = 240
# Of the fixture `api_server`.
KEY = "first-key"
STOP_SECONDS = 30
# What was compiled for one server, or for a test with the fixture `compiled_once`, all others load,
# also those of other workers of pytest-xdist: these are children of the process that made it.
if "TESTS_COMPILED" not in os.environ:
    _folder = tempfile.TemporaryDirectory(prefix="atomc-compiled-")
    os.environ["TESTS_COMPILED"] = _folder.name
COMPILED = os.environ["TESTS_COMPILED"]


def resident_bytes(pid="self"):
    """Of a process, on Linux."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@dataclass
class Server:
    """A running server: its URL, log lines and processes. reading: set while its log is read."""

    process: subprocess.Popen
    lines: list[str] = field(default_factory=list)
    url: str = ""
    reading: threading.Event = field(default_factory=threading.Event)

    def read_log(self):
        self.reading.set()
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            self.reading.wait()

    @property
    def engine_pid(self):
        return int(self.wait_for(r"engine (\d+)")[1])

    @property
    def log(self):
        return "\n".join(self.lines)

    def wait_for(self, pattern, seconds=START_SECONDS):
        """Waits for a log line that matches the pattern; returns the match."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.log)):
            over = time.monotonic() > until or self.process.poll() is not None
            assert not over, f"no {pattern!r} in {seconds} s: {self.log}"
            time.sleep(0.02)
        return found

    def all_of(self, pattern):
        """All matches of the pattern in the log."""
        return re.findall(pattern, self.log)

    def memory(self, pid):
        return resident_bytes(pid)


def few_files():
    """A low soft limit of open files, as in some shells: the server must raise it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))


@contextlib.contextmanager
def serving(*flags, cache=True):
    """A server on a free port, stopped at the end. Without `cache` it compiles whatever others have
    compiled.
    """
    command = [sys.executable, "-m", "atomc", "serve", "--port", "0", *map(str, flags)]
    settings = {
        "OMP_NUM_THREADS": "1",
        "ATOMC_CACHE": str(int(cache)),
        "ATOMC_CACHE_DIR": COMPILED,
    }
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=few_files,
        env=os.environ | settings,
    )
    server = Server(process)
    threading.Thread(target=server.read_log, daemon=True).start()
    try:
        server.url = server.wait_for(r"listening on (\S+)")[1]
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
