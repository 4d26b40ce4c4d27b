"""Why the runtime cannot serve a model that failed to compile, as one sentence."""

import logging

from torch import nn

from atomc.compiler.pipeline import PassError
from atomc.torch_compat.exceptions import out_of_memory
from atomc.torch_compat.trace_failure import raised_by_backend, trace_failure

log = logging.getLogger("atomc")


def refusal(model: nn.Module, error: BaseException) -> BaseException:
    """What to raise instead of an error of Dynamo's: ValueError with the reason, or what stands
    behind it if memory ran out. The log has the trace, at level debug."""
    cause = raised_by_backend(error)
    if isinstance(cause, MemoryError) or out_of_memory(cause):
        return cause
    inner = getattr(model, "hf_model", model)
    name = type(inner).__name__
    log.debug("%s was not compiled", name, exc_info=error)
    if isinstance(cause, PassError) and isinstance(cause.__cause__, ValueError):
        reason, where, only_here = str(cause.__cause__), "", True
    else:
        reason, where, only_here = trace_failure(cause)
    # True of transformers' classes, whose own attention is back there.
    elsewhere = only_here and inner is not model
    return ValueError(
        f"{name} cannot be served: {reason}"
        + f" ({where})" * bool(where)
        + '; torch.compile(model, backend="atom") in a program of your own has no such limit'
        * elsewhere
    )
