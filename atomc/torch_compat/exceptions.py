"""What an exception of torch means where its class does not say it. Imports no torch: nor does the front of the server."""

# Classes, by name, and parts of messages of a device that no longer works.
DEVICE_ERRORS = ("AcceleratorError", "OutOfMemoryError")
DEVICE_MESSAGES = ("CUDA error", "HIP error", "Triton Error")


def out_of_memory(error: BaseException) -> bool:
    """Whether torch raised this because memory ran out: on a CPU it has no class of its own."""
    return _is_a("OutOfMemoryError", error) or "can't allocate memory" in str(error)


def device_failed(error: BaseException) -> bool:
    """Whether the device no longer works, or has no memory left."""
    return any(_is_a(name, error) for name in DEVICE_ERRORS) or any(part in str(error) for part in DEVICE_MESSAGES)


def _is_a(name: str, error: BaseException) -> bool:
    return any(kind.__name__ == name for kind in type(error).__mro__)
