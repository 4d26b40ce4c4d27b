"""AITER as our kernels see it: which of its functions are there, and what all of its kernels ask of
a machine.

A version of AITER is known by its functions: each is looked for where versions have it, and must
take the arguments that we give. A machine that is not here has the AITER that these kernels were
written for.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from atomc.graph.sizes import known_equal, same_shape, same_sizes
from atomc.kernels.checks import Refuses
from atomc.kernels.row_views import as_rows
from atomc.ops.op import Refusal
from atomc.platform import Platform, provider_versions

log = logging.getLogger("atomc")

# The fp8 that each architecture multiplies.
FP8_OF = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
FUNCTIONS: list["Function"] = []


@functools.cache
def missing() -> str | None:
    """Why AITER cannot be imported here, found out and logged once a process; or None."""
    status = provider_versions()["aiter"]
    reason = status.reason
    if status.found:
        try:
            importlib.import_module("aiter")
        except Exception as error:  # of many types: no ROCm, a broken build
            version = f" {status.version}" if status.version else ""
            reason = f"AITER{version} cannot be imported: {type(error).__name__}: {error}"
    if reason:
        log.warning("AITER's kernels are not used: %s", reason)
    return reason


class Function:
    """A function of AITER, to be called as it is there.

    modules  where versions of AITER have it, the newest first
    takes    the arguments that we give besides those which every version has
    """

    def __init__(self, name: str, *modules: str, takes: Sequence[str] = ()):
        self.name, self.modules, self.takes = name, modules, tuple(takes)
        FUNCTIONS.append(self)

    def __repr__(self) -> str:
        return f"{self.modules[0]}.{self.name}"

    @functools.cached_property
    def found(self) -> Callable[..., Any] | str:
        """The function, or why there is none."""
        if reason := missing():
            return reason
        reasons = []
        for module in self.modules:
            try:
                function = getattr(importlib.import_module(module), self.name)
            except Exception as error:  # of many types: its modules compile and ask the device
                reasons.append(f"{type(error).__name__}: {error}")
                continue
            if lacking := _lacking(function, self.name, self.takes):
                reasons.append(f"it takes no {' and no '.join(lacking)}")
                continue
            return function  # type: ignore[no-any-return]
        return f"this AITER has no {self} that we can call ({'; '.join(dict.fromkeys(reasons))})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.found, str):
            raise RuntimeError(self.found)
        return self.found(*args, **kwargs)


def _lacking(function: Callable[..., Any], name: str, takes: Sequence[str]) -> list[str]:
    """The arguments that AITER's function of this name does not take."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # compiled: it does not say
        return []
    names = set(parameters)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        registered = getattr(torch.ops.aiter, name, None)
        if registered is None:
            return []
        names = {
            argument.name for argument in registered.default._schema.arguments
        }  # what the wrapper hides
    return [argument for argument in takes if argument not in names]


def unfit(platform: Platform, *functions: Function) -> Refusal | None:
    """Why these functions cannot be called on this machine, or None."""
    if not platform.is_rocm:
        return Refusal("hardware", "AITER runs on AMD GPUs")
    if platform.arch not in FP8_OF:
        return Refusal(
            "hardware",
            f"AITER's kernels are used on {' and '.join(FP8_OF)}, this is {platform.arch}",
        )
    if platform.here:
        for function in functions:
            if isinstance(function.found, str):
                return Refusal("library", function.found)
    return None


def installed(*functions: Function) -> Refuses:
    """`unfit` for these functions, as a part of `first_refusal`."""
    return lambda platform: unfit(platform, *functions)


def foreign_fp8(platform: Platform, *dtypes: torch.dtype) -> Refusal | None:
    """Why codes of one of these dtypes are none that the machine computes with."""
    native = FP8_OF[platform.arch]
    for dtype in dtypes:
        if dtype != native:
            text = f"{platform.arch} computes with {native}, the codes are {dtype}"
            return Refusal("dtype", text)
    return None


def foreign_operands(platform: Platform, x: Tensor, weight: Tensor) -> Refusal | None:
    return foreign_fp8(platform, weight.dtype, x.dtype)


def foreign_codes(platform: Platform, dtype: torch.dtype) -> Refusal | None:
    return foreign_fp8(platform, dtype)


def no_mxfp4(platform: Platform) -> Refusal | None:
    return (
        Refusal("hardware", "gfx942 does not multiply MXFP4") if platform.arch == "gfx942" else None
    )


def rounded_up(rounding: str) -> Refusal | None:
    """Unless scales of MXFP4 are rounded to even."""
    if rounding == "even":
        return None
    return Refusal("argument", f"AITER's kernels round scales to even, here rounding={rounding!r}")


def refuse_column_major(column_major: bool) -> Refusal | None:
    """If scales are to be written column by column."""
    return (
        Refusal("layout", "AITER's kernel writes the scales row by row") if column_major else None
    )


def scattered(**tensors: Tensor | None) -> Refusal | None:
    """Why one of these cannot be seen as rows of one stride, or None."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor.shape[-1], int):
            return Refusal("shape", f"the rows of {name} have no fixed width")
        if tensor.shape[-1] > 1 and not known_equal(tensor.stride(-1), 1):
            return Refusal("layout", f"the last dimension of {name} is not contiguous")
        for d in range(tensor.dim() - 2):
            if known_equal(tensor.shape[d], 1):
                continue  # its stride is not used
            if not known_equal(tensor.stride(d), tensor.shape[d + 1] * tensor.stride(d + 1)):
                return Refusal("layout", f"the rows of {name} do not follow each other")
    return None


def gapped(**tensors: Tensor | None) -> Refusal | None:
    """Why one of these is not contiguous, or None. Some functions of AITER do not read strides."""
    for name, tensor in tensors.items():
        if reason := scattered(**{name: tensor}):
            return reason
        if tensor is None or all(known_equal(size, 1) for size in tensor.shape[:-1]):
            continue
        if not known_equal(tensor.stride(-2), tensor.shape[-1]):
            return Refusal(
                "layout", f"between the rows of {name} are gaps, which AITER does not see"
            )
    return None


def dense_rows(x: Tensor) -> Tensor:
    """x [..., D] as contiguous [rows, D]: compiled functions of AITER do not look at strides."""
    return as_rows(x).contiguous()


def plus(out: Tensor, bias: Tensor | None) -> Tensor:
    """out + bias, in out: for products of AITER's that add none. It rounds a second time."""
    return out if bias is None else out.add_(bias)


def product_of_rows(
    function: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    *operands: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """function(rows of x, weight, ...), a product of x [..., K] -> [..., N] in dtype, plus bias
    [N]; weight [N, ...]. Of no rows it is not called.
    """
    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():
        return x.new_empty(shape, dtype=dtype)
    return plus(function(as_rows(x), weight, *operands, dtype=dtype).view(shape), bias)


def neighbours(first: Tensor, second: Tensor) -> bool:
    """Whether the two are the halves of one tensor's rows, which follow each other."""
    return (
        first.dtype == second.dtype
        and first.untyped_storage()._cdata == second.untyped_storage()._cdata
        and first.dim() >= 2
        and same_shape(first, second)
        and same_sizes(first.stride(), second.stride())
        and known_equal(second.storage_offset(), first.storage_offset() + first.shape[-1])
        and known_equal(first.stride(-2), 2 * first.shape[-1])
        and scattered(first=first) is None
    )


def side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """The rows of both in one tensor [rows, 2 D], without a copy where they are neighbours."""
    if neighbours(first, second):
        width = 2 * first.shape[-1]
        return first.as_strided((first.numel() // first.shape[-1], width), (width, 1))
    return torch.cat((as_rows(first), as_rows(second)), -1)
