"""Launches of kernels by CUDA's driver: what a launch consists of, in the driver's structures."""

import ctypes
import functools
import threading
from typing import NamedTuple

import torch

# Its number and the 64 bytes of its value.
Attribute = tuple[int, bytes]
_OVERLAPS: Attribute = (6, (1).to_bytes(64, "little"))  # programmatic stream serialization


class Kernel(NamedTuple):
    """A launch of a kernel as CUDA's driver gets it, but for the stream.

    function    handle of the kernel
    dims        grid (3), block (3), bytes of shared memory
    parameters  the bytes of each
    attributes  of the launch
    overlaps    whether it may start before the preceding kernel ends
    """

    function: int
    dims: tuple[int, ...]
    parameters: tuple[bytes, ...]
    attributes: tuple[Attribute, ...] = ()
    overlaps: bool = False


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("number", ctypes.c_uint64), ("value", ctypes.c_char * 64)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("dims", ctypes.c_uint * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def launch_config(kernel: Kernel) -> LaunchConfig:
    """The sizes and attributes of a launch; the stream is the default one."""
    pairs = [*kernel.attributes, *([_OVERLAPS] if kernel.overlaps else [])]
    attributes = (LaunchAttribute * len(pairs))(*(LaunchAttribute(*pair) for pair in pairs))
    return LaunchConfig((ctypes.c_uint * 7)(*kernel.dims), None, attributes, len(pairs))


@functools.cache
def driver() -> ctypes.CDLL:
    """CUDA's driver. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def enter_thread() -> None:
    """Let the driver launch in this thread, which has no context before CUDA's runtime uses it."""
    if not _thread.has_context:
        context = ctypes.c_void_p()
        check(driver().cuCtxGetCurrent(ctypes.byref(context)))
        if not context:  # so that no stream of this thread is captured, which must not be asked
            torch.cuda.current_stream().query()
        _thread.has_context = True


def check(status: int) -> None:
    """Raise RuntimeError for what a call of the driver returns if it failed."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA's driver: error {status}: {(text.value or b'').decode()}")
