"""Time between the tokens of a stream while another client sends one of the worst requests
(hostile.py) again and again.

    python bench/bystander.py --json bench/results/bystander-cpu.json
    python bench/bystander.py --url http://127.0.0.1:8000 --only regex --seconds 5

p50, p99, max: milliseconds between two tokens of the bystander. moved: p99 beside that of a quiet
server. sent, status: how many of the requests were answered meanwhile, and how the first one was.
Without --url it starts `atomc serve` on the demo.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))
from hostile import COMPLETIONS, HOSTILE, MODEL

STREAM = {
    "model": MODEL,
    "prompt": "She looked at him",
    "max_tokens": 1900,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
JSON = {"Content-Type": "application/json"}


def gaps(url: str, seconds: float, begin: Callable[[], object] | None = None) -> list[float]:
    """Seconds between tokens of one stream after another; `begin` is called after the first token,
    a second before.
    """
    found: list[float] = []
    since, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
        connection.request("POST", COMPLETIONS, json.dumps(STREAM), JSON)
        answer, last = connection.getresponse(), None
        while line := answer.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if begin:
                    begin()
                    begin, since, until = None, now + 1, now + 1 + seconds  # it makes its body
                found += [now - last] if last is not None and last >= since else []
                last = now
            if time.monotonic() > until:
                break
        connection.close()
    return found


def attack(
    url: str, name: str, stop: Event, answers: "multiprocessing.SimpleQueue[int | str]"
) -> None:
    """Send the request again and again, and put how it was answered."""
    path, body = HOSTILE[name][0], HOSTILE[name][1]()
    while not stop.is_set():
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
        try:
            connection.request("POST", path, body, JSON)
            answer = connection.getresponse()
            answer.read()
            answers.put(answer.status)
        except (OSError, http.client.HTTPException) as error:
            # The server answers before it has read a body that is too large.
            answers.put(type(error).__name__)
        connection.close()


def under_attack(url: str, name: str, seconds: float) -> tuple[list[float], list[int | str]]:
    """The bystander's gaps meanwhile, and the answers."""
    context = multiprocessing.get_context("spawn")
    stop, answers = context.Event(), context.SimpleQueue()
    process = context.Process(target=attack, args=(url, name, stop, answers), daemon=True)
    found = gaps(url, seconds, process.start)
    stop.set()
    got: list[int | str] = []
    process.join(1)
    process.kill()
    process.join()
    while not answers.empty():
        got.append(answers.get())
    return found, got


def row(
    name: str, found: list[float], quiet: float | None, answers: list[int | str]
) -> dict[str, Any]:
    found = sorted(found) or [float("nan")]
    p50, p99, most = (
        1e3 * found[min(int(share * len(found)), len(found) - 1)] for share in (0.5, 0.99, 1.0)
    )
    return {
        "name": name,
        "p50": p50,
        "p99": p99,
        "max": most,
        "moved": p99 - quiet if quiet is not None else 0.0,
        "tokens": len(found),
        "sent": len(answers),
        "status": answers[0] if answers else "-",
    }


@contextmanager
def demo(model: str | None = None) -> Iterator[str]:
    """A server on the folder `model`, without one on the model that comes with atomc."""
    command = [sys.executable, "-m", "atomc", "serve", "--port", "0", "--no-log-requests"]
    command += [model, "--served-model-name", MODEL] if model else []
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"listening on (\S+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help=f"a server that runs, with the model name {MODEL}")
    parser.add_argument("--model", help="the folder of a model to serve instead of the demo")
    parser.add_argument("--only", default="", help="requests with this in their name")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each request")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    given = parser.parse_args()
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}"
    )
    print(f"{' '.join(['python', *sys.argv])}\n{machine}\n")
    print(f"{'':36}{'p50':>8}{'p99':>8}{'max':>8}{'moved':>8}{'tokens':>8}{'sent':>6}  status")
    with demo(given.model) if not given.url else running(given.url) as url:
        gaps(url, 2)
        rows = [row("(quiet)", gaps(url, given.seconds), None, [])]
        _show(rows[0])
        for name in HOSTILE:
            if given.only in name:
                found, answers = under_attack(url, name, given.seconds)
                rows.append(row(name, found, rows[0]["p99"], answers))
                _show(rows[-1])
    if given.json:
        result = {"machine": machine, "command": " ".join(["python", *sys.argv]), "rows": rows}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


@contextmanager
def running(url: str) -> Iterator[str]:
    yield url


def _show(one: dict[str, Any]) -> None:
    print(
        f"{one['name']:36}{one['p50']:8.1f}{one['p99']:8.1f}{one['max']:8.1f}{one['moved']:8.1f}{one['tokens']:8}"
        f"{one['sent']:6}  {one['status']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
