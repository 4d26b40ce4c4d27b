"""Chooses the number of CPU threads."""

from dataclasses import dataclass

import torch

from atomc.options import openmp_threads
from atomc.platform import usable_cores


@dataclass(frozen=True)
class Threads:
    """The number of threads and the reason."""

    count: int
    why: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' if self.count > 1 else ''}: {self.why}"


def choose(asked: int | None, *, spare: int = 0, processes: int = 1) -> Threads:
    """The requested number, else OMP_NUM_THREADS, else one per physical core that the process may
    use.

    spare       number of cores to leave to other processes, if there are more than two
    processes   number of processes that each run with so many threads
    """
    if asked is not None:
        return Threads(asked, "as threads says")
    if (from_environment := openmp_threads()) is not None:
        return Threads(from_environment, "as OMP_NUM_THREADS says; threads changes it")
    cores = usable_cores()
    used = max(cores - spare, 2) if cores > 2 else cores
    count = max(used // processes, 1)
    if torch.get_num_threads() < count:
        return Threads(torch.get_num_threads(), "as torch is set; threads changes it")
    left = f", less {cores - used} for the front process" if used < cores else ""
    left += f", shared by {processes} processes" if processes > 1 else ""
    shared = ", and 1 suits a machine that others use too" if count > 1 else ""
    return Threads(
        count, f"physical cores that this process may use{left}; threads changes it{shared}"
    )


def use(threads: Threads) -> None:
    """Set torch's number of threads for the whole process."""
    if torch.get_num_threads() != threads.count:
        torch.set_num_threads(threads.count)
