"""Processes of this machine, as Linux shows them."""

import time
from pathlib import Path


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")  # of each thread
    return [int(child) for file in files for child in file.read_text().split()]


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)
