"""Arguments as a kernel reads them."""

from typing import Any

from atomc.ops.op import Kernel


def with_prepared(kernel: Kernel, arguments: dict[str, Any]) -> dict[str, Any]:
    """These arguments with the weights that the kernel prepares, prepared."""
    return arguments | {
        names[0]: prepare(*map(arguments.get, names)).tensors
        for names, prepare in kernel.prepare.items()
        if arguments.get(names[0]) is not None
    }
