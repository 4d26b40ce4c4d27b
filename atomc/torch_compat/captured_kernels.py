"""Captures of calls, and what CUDA sees of one: its kernels, which a capture does not run."""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# A kernel: its handle, grid (3), block (3) and bytes of shared memory. Another node: its type.
Node = tuple[int, ...]
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of CUDA's driver."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("dims", ctypes.c_uint * 7),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def captured_kernels(call: Callable[[], object], device: torch.device) -> Counter[Node]:
    """How often a call launches each kernel, with its grid, on an NVIDIA GPU. The call runs on the
    host only. Raises RuntimeError if it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # "relaxed" lets other threads, and the loading of a kernel, go on.
        capture_into(graph, call, capture_error_mode="relaxed")
    try:
        return Counter(_nodes(graph.raw_cuda_graph()))
    except (OSError, AttributeError) as error:  # of a library that is not there, or older
        raise RuntimeError(f"CUDA's driver does not describe a captured call: {error}") from error


def capture_into(graph: torch.cuda.CUDAGraph, call: Callable[[], T], **how: Any) -> T:
    """Capture a call on the current stream. how: as of CUDAGraph.capture_begin. Raises the first
    error of the call.
    """
    graph.capture_begin(**how)
    try:
        result = call()
    except BaseException:  # Ctrl-C too: the stream would go on capturing
        with suppress(RuntimeError):  # says only that an error came before
            graph.capture_end()
        raise
    graph.capture_end()
    return result


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device, since libraries hold memory for each stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _nodes(graph: int) -> list[Node]:
    driver = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(number)))
    nodes = (ctypes.c_void_p * number.value)()
    _check(driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(number)))
    return [_node(driver, ctypes.c_void_p(node)) for node in nodes]


def _node(driver: ctypes.CDLL, node: ctypes.c_void_p) -> Node:
    kind = ctypes.c_int()
    _check(driver.cuGraphNodeGetType(node, ctypes.byref(kind)))
    if kind.value != _KERNEL:
        return (kind.value,)
    parameters = _KernelParameters()
    _check(driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(parameters)))
    return (parameters.function or parameters.kernel or 0, *parameters.dims)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"CUDA's driver does not describe a captured call: error {status}")
