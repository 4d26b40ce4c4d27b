"""Whether flash-linear-attention (fla) may run on this machine, and its functions.

It is imported when a kernel is selected that the user asked for, not before: the import takes
seconds, loads transformers where fla's models are installed too, and on NVIDIA GPUs before sm80
sets TRITON_F32_DEFAULT, which changes all Triton kernels of the process.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torch.torch_version import TorchVersion

from atomc.ops.op import Refusal
from atomc.platform import Platform, provider_versions

OLDEST_GPU = (8, 0)
OLDEST = "0.6"  # the version that these kernels were written for
MODULE = "fla.ops.gated_delta_rule"
# fla ignores keywords that it does not know, so that a renamed one would give wrong results.
TAKES = ("q", "k", "v", "g", "beta", "scale", "use_qk_l2norm_in_kernel")


def unfit(platform: Platform, *functions: str) -> Refusal | None:
    """Refuse machines on which these functions of fla cannot be called, or need not be."""
    if platform.is_cpu:
        return Refusal("hardware", "fla's kernels run on a GPU")
    if platform.is_cuda and (platform.capability or OLDEST_GPU) < OLDEST_GPU:
        return Refusal(
            "hardware",
            f"fla is used on NVIDIA GPUs from sm80 on, this is {platform.arch}: there it changes "
            "how all Triton kernels multiply fp32",
        )
    if "fla" not in platform.asked:
        return Refusal("option", "used only if the option `providers` names fla")
    if platform.here:
        for name in functions:
            if isinstance(rule := _found(name), str):
                return Refusal("library", rule)
    return None


@functools.cache
def missing() -> str | None:
    """Why fla cannot be used here, or None."""
    status = provider_versions()["fla"]
    if not status.found:
        return status.reason
    try:
        version: str = importlib.import_module("fla").__version__
    except Exception as error:  # of many types: it asks for devices and libraries
        return f"fla {status.version or ''} cannot be imported: {type(error).__name__}: {error}"
    if TorchVersion(version) < OLDEST:
        return f"fla {version} is too old: pip install 'fla-core>={OLDEST}'"
    return None


def function(name: str) -> Callable[..., Any]:
    """fla's function of this name. Raises RuntimeError if there is none."""
    rule = _found(name)
    if isinstance(rule, str):
        raise RuntimeError(rule)
    return rule


@functools.cache
def _found(name: str) -> Callable[..., Any] | str:
    """fla's function of this name, or why there is none that these kernels can call."""
    if reason := missing():
        return reason
    try:
        rule: Callable[..., Any] = getattr(importlib.import_module(MODULE), name)
    except Exception as error:  # of many types, as above
        return f"this fla has no {MODULE}.{name}: {type(error).__name__}: {error}"
    parameters = inspect.signature(rule).parameters
    if lacking := [argument for argument in TAKES if argument not in parameters]:
        return f"{name} of this fla takes no {' and no '.join(lacking)}"
    return rule
