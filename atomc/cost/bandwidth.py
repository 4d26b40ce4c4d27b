"""Measures the memory bandwidth of a machine without a known data sheet."""

import time

import torch

BYTES = 128 * 2**20
RUNS = 5


def measured_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes per second, read and written, of the fastest of a few copies beyond the caches."""
    source = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * BYTES / min(_seconds(source, target) for _ in range(RUNS))


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    start = time.perf_counter()
    target.copy_(source)
    if source.is_cuda:
        torch.cuda.synchronize(source.device)
    return time.perf_counter() - start
