"""Keeps modes that the caller has set for its own computations from those of the runtime."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


@contextmanager
def torch_modes_off() -> Iterator[None]:
    """Also a decorator.

    inference mode   tensors that are allocated in it cannot be written outside of it
    autocast         a program computes in the dtypes for which it was compiled
    default device   tensors of the host are on the CPU
    """
    contexts: list[AbstractContextManager[object]] = []
    if torch.is_inference_mode_enabled():
        contexts.append(torch.inference_mode(False))
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            contexts.append(torch.autocast(kind, enabled=False))
    if torch.empty(0).device.type != "cpu":  # faster than get_default_device
        contexts.append(torch.device("cpu"))
    if not contexts:
        yield
        return
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
