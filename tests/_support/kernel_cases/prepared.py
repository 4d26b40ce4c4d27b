"""Arguments as a kernel reads them."""

from typing import Any

from atomc.ops.op import Kernel


def with_prepared(kernel: Kernel, arguments: dict[str, Any]) -> dict[str, Any]:
    """These arguments with the weights that the kernel prepares, prepared."""
    return arguments | kernel.prepared(arguments)
