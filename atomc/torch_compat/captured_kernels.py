"""Captures of calls, and what CUDA sees of one: its kernels, which a capture does not run."""

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch

from atomc.torch_compat.cuda_driver import Attribute, Kernel, check, driver

T = TypeVar("T")
# A kernel: its handle, grid (3), block (3) and bytes of shared memory. Another node: its type.
Node = tuple[int, ...]
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
# Attributes of a launch that a kernel node has: cooperative, size of clusters, their order.
_COOPERATIVE, _CLUSTER, _CLUSTER_ORDER = 2, 4, 5


class _KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of CUDA's driver."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("dims", ctypes.c_uint * 7),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def captured_kernels(call: Callable[[], object], device: torch.device) -> Counter[Node]:
    """How often a call launches each kernel, with its grid, on an NVIDIA GPU. The call runs on the
    host only. Raises RuntimeError if it cannot be captured.
    """
    graph = _captured(call, device)
    with _described():
        return Counter(_node(node) for node in _nodes(graph))


def captured_kernel(launch: Callable[[], object], device: torch.device) -> Kernel:
    """The kernel that a call launches, with all that the driver gets. Raises RuntimeError if it
    launches another number of kernels, or if two calls launch different ones.
    """
    graph = _captured(lambda: (launch(), launch()), device)
    with _described():
        nodes = _nodes(graph)
        if [_node_type(node) for node in nodes] != [_KERNEL, _KERNEL]:
            raise RuntimeError("a launch is not one kernel")
        first, second = (_kernel(node) for node in nodes)
        if first != second:
            raise RuntimeError("a launch differs in each call")
        return first._replace(overlaps=_overlap(graph))


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


def _captured(call: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    stream = _capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # "relaxed" lets other threads, and the loading of a kernel, go on.
        capture_into(graph, call, capture_error_mode="relaxed")
    return graph


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device, since libraries hold memory for each stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _described() -> Iterator[None]:
    """Raises RuntimeError for what a missing or older driver lacks."""
    try:
        yield
    except (OSError, AttributeError) as error:
        message = f"CUDA's driver does not describe a captured call: {error}"
        raise RuntimeError(message) from error


def _nodes(graph: torch.cuda.CUDAGraph) -> list[ctypes.c_void_p]:
    """In the order of the launches."""
    handle, number = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    check(driver().cuGraphGetNodes(handle, None, ctypes.byref(number)))
    nodes = (ctypes.c_void_p * number.value)()
    check(driver().cuGraphGetNodes(handle, nodes, ctypes.byref(number)))
    return [ctypes.c_void_p(node) for node in nodes]


def _node_type(node: ctypes.c_void_p) -> int:
    kind = ctypes.c_int()
    check(driver().cuGraphNodeGetType(node, ctypes.byref(kind)))
    return kind.value


def _node(node: ctypes.c_void_p) -> Node:
    if kind := _node_type(node):
        return (kind,)
    parameters = _parameters(node)
    return (parameters.function or parameters.kernel or 0, *parameters.dims)


def _parameters(node: ctypes.c_void_p) -> _KernelParameters:
    parameters = _KernelParameters()
    check(driver().cuGraphKernelNodeGetParams_v2(node, ctypes.byref(parameters)))
    return parameters


def _kernel(node: ctypes.c_void_p) -> Kernel:
    parameters = _parameters(node)
    if not parameters.function or not parameters.parameters:
        raise RuntimeError("a launch has no list of parameters")
    return Kernel(
        parameters.function,
        tuple(parameters.dims),
        tuple(
            ctypes.string_at(parameters.parameters[number], size)
            for number, size in enumerate(_sizes(parameters.function))
        ),
        tuple(_attributes(node)),
    )


def _sizes(function: int) -> Iterator[int]:
    """Bytes of the parameters of a kernel."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    where, number = (ctypes.byref(offset), ctypes.byref(size)), 0
    get = driver().cuFuncGetParamInfo
    while get(ctypes.c_void_p(function), ctypes.c_size_t(number), *where) == 0:
        yield size.value
        number += 1


def _attributes(node: ctypes.c_void_p) -> Iterator[Attribute]:
    """The attributes of a launch that its capture keeps, where they are set."""
    numbers = [_COOPERATIVE, _CLUSTER]
    for number in numbers:
        value = (ctypes.c_char * 64)()
        check(driver().cuGraphKernelNodeGetAttribute(node, number, ctypes.byref(value)))
        if any(value.raw):
            yield number, value.raw
            if number == _CLUSTER:
                numbers.append(_CLUSTER_ORDER)


def _overlap(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether the second of two kernels may start before the first one ends."""
    source, target, data = ctypes.c_void_p(), ctypes.c_void_p(), (ctypes.c_uint8 * 8)()
    number = ctypes.c_size_t(1)
    where = [ctypes.byref(x) for x in (source, target, data, number)]
    check(driver().cuGraphGetEdges_v2(ctypes.c_void_p(graph.raw_cuda_graph()), *where))
    return data[2] == _PROGRAMMATIC
