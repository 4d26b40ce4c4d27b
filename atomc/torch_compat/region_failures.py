"""Where Dynamo cannot trace a nested compile region, it fails. With a handler that changes what is
traced, it begins again.
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo.exc import (
    InternalTorchDynamoError,
    UncapturedHigherOrderOpError,
    UnspecializeRestartAnalysis,
    Unsupported,
)
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable

# Gets the first operand of the region and why it failed. True: trace again, else the error is
# raised.
Handler = Callable[[nn.Module, Exception], bool]

_FAILURES = (
    AssertionError,  # torch 2.15: "Freevar has no source", for numbers under dynamic shapes
    InternalTorchDynamoError,
    UncapturedHigherOrderOpError,
    Unsupported,
)


def on_region_failure(handler: Handler | None) -> None:
    """Have Dynamo ask the handler; None: as torch does."""
    kind = _invoke_subgraph()
    if "call_function" in vars(kind):
        del kind.call_function
    if handler is None:
        return
    original = kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            return original(self, tx, args, kwargs)
        except _FAILURES as error:
            operand = args[1].realize() if len(args) > 1 else None
            module = getattr(operand, "value", None)
            if isinstance(module, nn.Module) and handler(module, error):
                raise UnspecializeRestartAnalysis from error
            raise

    kind.call_function = call_function


def _invoke_subgraph() -> Any:
    """The class that traces a region; its module differs between versions."""
    kinds = [TorchHigherOrderOperatorVariable]
    while kinds:
        kind = kinds.pop()
        if kind.__name__ == "InvokeSubgraphHigherOrderVariable":
            return kind
        kinds += kind.__subclasses__()
    raise AssertionError("torch has no nested compile regions")
