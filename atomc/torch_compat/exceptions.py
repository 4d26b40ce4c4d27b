"""Classifies exceptions of torch, and of libraries in Rust. Does not import torch, which the front
process of the server does not need.
"""

# Exception classes, by name, and parts of messages that mean a failed device.
DEVICE_ERRORS = ("AcceleratorError", "OutOfMemoryError")
DEVICE_MESSAGES = ("CUDA error", "HIP error", "Triton Error")


def is_failure(error: BaseException) -> bool:
    """Whether work failed: an Exception, or a panic of a Rust library, which does not derive from
    it and has a class in each library; not KeyboardInterrupt or a cancellation.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of memory; on a CPU this has no exception class."""
    return _is_a("OutOfMemoryError", error) or "can't allocate memory" in str(error)


def device_failed(error: BaseException) -> bool:
    """Whether the device failed or is out of memory."""
    return any(_is_a(name, error) for name in DEVICE_ERRORS) or any(
        part in str(error) for part in DEVICE_MESSAGES
    )


def _is_a(name: str, error: BaseException) -> bool:
    return any(kind.__name__ == name for kind in type(error).__mro__)
