"""Measures the time from the start of a process to its first token, by phase: the engine alone, or
the server.

A cold start has empty caches of compiled code; a warm start has those that the previous start
wrote. In both, the files of the model and of the libraries may be in the page cache of the
operating system.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atomc.runtime.config import EngineConfig
from atomc.runtime.processes.garbage_collection import frozen_imports

# Environment variables of cache directories.
CACHES = ("ATOMC_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
PROMPT = [300, 301, 302, 303]
LARGE_MODULES = (
    "torch._dynamo",
    "sympy",
    "torch._inductor.compile_fx",
    "transformers",
    "triton.compiler",
)
POLL_SECONDS = 0.02

Start = dict[str, Any]


def starts(
    config: EngineConfig, *, warm: int, limit: float, flags: Sequence[str] | None = None
) -> Iterator[Start]:
    """Yields the result of one cold start and then of `warm` warm ones: {"way", "seconds",
    "phases", ...}.

    limit   timeout of one start in seconds
    flags   flags of `atomc serve`, to start the server; None: the engine alone

    Raises ValueError, with its last line of output, for a process that fails or times out.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name.lower())) for name in CACHES}
        for number in range(1 + warm):
            way = "cold" if number == 0 else "warm"
            one = (
                engine_start(config, caches, limit)
                if flags is None
                else server_start(flags, caches, limit)
            )
            yield {"way": way, **one}


def engine_start(config: EngineConfig, environment: Mapping[str, str], limit: float) -> Start:
    """Seconds from the start of a process with an engine to its first token."""
    command = [
        sys.executable,
        "-m",
        "atomc.runtime.bench.startup",
        json.dumps(asdict(config)),
        str(time.time()),
    ]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the engine was not ready after {limit:.0f} s") from error
    if done.returncode:
        raise ValueError(f"the engine did not start: {last_line(done.stderr)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def server_start(flags: Sequence[str], environment: Mapping[str, str], limit: float) -> Start:
    """Seconds from `atomc serve` to /ready, which generates a token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "atomc",
        "serve",
        *flags,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log
        )
        try:
            while not get(f"http://127.0.0.1:{port}/ready"):
                if process.poll() is not None or time.perf_counter() - began > limit:
                    log.seek(0)
                    raise ValueError(
                        f"the server was not ready after {time.perf_counter() - began:.0f} s: "
                        f"{last_line(log.read())}"
                    )
                time.sleep(POLL_SECONDS)
            seconds = time.perf_counter() - began
            status = json.loads(get(f"http://127.0.0.1:{port}/status") or b"{}")
        finally:
            process.terminate()
            process.wait()
    return start_result(
        seconds, dict(status.get("phases", {})), {"device": status.get("device", "")}
    )


def start_result(seconds: float, phases: dict[str, float], more: Mapping[str, Any]) -> Start:
    return {"seconds": seconds, "phases": phases | {"rest": seconds - sum(phases.values())}, **more}


def get(url: str) -> bytes | None:
    """The body of the response, or None unless the status is 200."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return bytes(response.read())
    except (urllib.error.URLError, OSError):
        return None


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it has no output"


def format_starts(found: Sequence[Start]) -> str:
    """A table with a column per start and a line per phase."""
    names = list(dict.fromkeys(name for start in found for name in start["phases"]))
    lines = [f"{'seconds':<14}" + "".join(f"{start['way']:>9}" for start in found)]
    for name in names:
        lines.append(
            f"{name:<14}" + "".join(f"{start['phases'].get(name, 0.0):>9.2f}" for start in found)
        )
    return "\n".join(
        [*lines, f"{'total':<14}" + "".join(f"{start['seconds']:>9.2f}" for start in found)]
    )


def triton_kernels() -> dict[str, float]:
    """A live counter of the Triton kernels that this process compiles or finds in the disk cache,
    and of the seconds.
    """
    counts = {"compiled": 0, "found": 0, "seconds": 0.0}
    try:
        from triton import knobs
    except ImportError:  # no Triton, or one before 3.4
        return counts

    def add(*, times: Any, cache_hit: bool, **what: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1
        counts["seconds"] += times.total / 1e6

    knobs.compilation.listener = add
    return counts


def main(config: str, spawned: float) -> None:
    """The measured process: start an engine, generate a token, and print the seconds of each phase
    as JSON.
    """
    phases = {"python": time.time() - spawned}
    mark = time.perf_counter()
    settings = EngineConfig(**json.loads(config))
    with frozen_imports():  # as the server's engine process
        import torch

        phases["import torch"] = time.perf_counter() - mark
        mark = time.perf_counter()
        on_gpu = torch.cuda.is_available() and settings.device != "cpu"
        if on_gpu:
            torch.zeros(1, device=settings.device or "cuda")
            phases["CUDA context"] = time.perf_counter() - mark
            mark = time.perf_counter()
        from atomc.runtime.engine import Engine
        from atomc.runtime.requests.sampling_params import SamplingParams

    phases["import"] = time.perf_counter() - mark
    kernels = triton_kernels() if on_gpu else {}
    engine = Engine(settings, progress=False)
    mark = time.perf_counter()
    engine.add(engine.request("0", PROMPT, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    first = time.perf_counter() - mark
    seconds = time.time() - spawned
    report = engine.program.report
    more = {
        "compile": dict(report.phases),
        "graphs": len(report.cuda_graphs),
        "notes": report.notes,
        "triton": kernels,
        "imported": [name for name in LARGE_MODULES if name in sys.modules],
        "device": str(engine.program.device),
    }
    print(
        json.dumps(
            start_result(seconds, {**phases, **engine.phases, "first token": first}, more),
            default=str,
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
