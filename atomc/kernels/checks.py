"""Checks of arguments that kernels of several providers share. Each returns a Refusal, or None if
the check holds.

Chain them with `or`: `unlike(HALVES, q=q, k=k) or wrong_rank((3, 4), q=q)`; the first one that
fails is the reason. Pass tensors by the names to show in the sentence, None for an absent optional
one. `first_refusal` chains functions that declare what they read of a call, such as
`named("q k", unlike, HALVES)`. Sizes and strides are compared without adding guards to the graph.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from atomc.graph.sizes import known_equal, same_shape, spell_shape
from atomc.ops.by_name import call_by_name
from atomc.ops.op import Refusal
from atomc.platform import Platform

FP8_MULTIPLIED = (8, 9)  # from this compute capability on
Refuses = Callable[..., Refusal | None]  # of a platform, and the arguments of a call by name


def first_refusal(*checks: Refuses, **constants: object) -> Refuses:
    """The first refusal of these checks, each of which reads some of the arguments of a call.

    constants  arguments that the checks take whatever those of the call are
    """

    def refuse_call(platform: Platform, **arguments: object) -> Refusal | None:
        everything = {"platform": platform, **arguments, **constants}
        refusals = (call_by_name(check, **everything) for check in checks)
        return next(filter(None, refusals), None)

    return refuse_call


def named(names: str, check: Callable[..., Refusal | None], *args: object) -> Refuses:
    """`check` of the arguments of these names: `named("q k", unlike, HALVES)` is unlike(HALVES,
    q=q, k=k).
    """

    def refuse_named(**arguments: object) -> Refusal | None:
        return check(*args, **{name: arguments[name] for name in names.split()})

    return refuse_named


def not_a_cpu(platform: Platform) -> Refusal | None:
    return None if platform.is_cpu else Refusal("hardware", "written for the CPU")


def refuse_gpus(platform: Platform) -> Refusal | None:
    """For kernels that take all arguments on a CPU."""
    return not_a_cpu(platform)


def older_than(capability: tuple[int, int], platform: Platform, what: str) -> Refusal | None:
    """Refuse other platforms than NVIDIA GPUs of at least this compute capability."""
    if platform.is_cuda and platform.capability is not None and platform.capability >= capability:
        return None
    return Refusal("hardware", f"{what} on NVIDIA GPUs from sm{capability[0]}{capability[1]} on")


def no_fp8_products(platform: Platform, *dtypes: torch.dtype) -> Refusal | None:
    """Refuse e4m3fn on an NVIDIA GPU without instructions for it."""
    if torch.float8_e4m3fn not in dtypes or (
        platform.capability is not None and platform.capability >= FP8_MULTIPLIED
    ):
        return None
    return Refusal("hardware", f"{platform.arch} has no fp8 instructions; sm89 and later have")


def no_bf16_products(platform: Platform, dtype: torch.dtype) -> Refusal | None:
    if dtype != torch.bfloat16 or platform.supports_bf16:
        return None
    return Refusal("hardware", f"{platform.name} does not multiply bfloat16")


def unlike(dtypes: Collection[torch.dtype], **tensors: Tensor | None) -> Refusal | None:
    """Refuse tensors that do not all have the same dtype, one of these."""
    given = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) <= 1 and all(dtype in dtypes for dtype in given.values()):
        return None
    came = ", ".join(f"{name} is {dtype}" for name, dtype in given.items())
    return Refusal(
        "dtype",
        f"{came}: written for {_listed(dtypes)}{', all of one dtype' if len(given) > 1 else ''}",
    )


def _listed(choices: Collection[torch.dtype] | Collection[int]) -> str:
    return " or ".join(map(str, choices))


def wrong_result(dtypes: Collection[torch.dtype], out_dtype: torch.dtype) -> Refusal | None:
    if out_dtype in dtypes:
        return None
    return Refusal("dtype", f"the result is {out_dtype}: written for {_listed(dtypes)}")


def wrong_rank(ranks: Collection[int], **tensors: Tensor | None) -> Refusal | None:
    """Refuse a tensor, unless None, whose number of dimensions is not in `ranks`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim() not in ranks:
            return Refusal(
                "shape", f"{name} has {tensor.dim()} dimensions: written for {_listed(ranks)}"
            )
    return None


def unlike_shapes(x: Tensor, **others: Tensor | None) -> Refusal | None:
    """Refuse others, unless None, that do not have the shape of x."""
    for name, other in others.items():
        if other is not None and not same_shape(x, other):
            return Refusal(
                "shape", f"{name} is {spell_shape(other.shape)}, expected {spell_shape(x.shape)}"
            )
    return None


def too_wide(width: int, most: int, what: str = "rows") -> Refusal | None:
    return (
        Refusal("shape", f"{what} of {width} exceed the limit of {most}") if width > most else None
    )


def unaligned_heads(q: Tensor, v: Tensor, widest: int) -> Refusal | None:
    """Refuse head widths that are not multiples of 8, or exceed `widest`."""
    widths = (q.shape[-1], v.shape[-1])
    if any(width % 8 or width > widest for width in widths):
        return Refusal(
            "shape",
            f"heads of {widths[0]} and {widths[1]}: written for multiples of 8 up to {widest}",
        )
    return None


def odd_group(group: int, least: int = 1) -> Refusal | None:
    """Refuse groups whose number of columns is not a power of two, or less than `least`."""
    if group < least or group & (group - 1):
        return Refusal(
            "shape", f"groups of {group} columns: written for powers of two from {least} on"
        )
    return None


def uneven(width: int, block: int) -> Refusal | None:
    return (
        Refusal("shape", f"rows of {width} are not a multiple of {block}")
        if width % block
        else None
    )


def strided(**tensors: Tensor) -> Refusal | None:
    """Refuse a tensor whose last dimension is not contiguous."""
    for name, tensor in tensors.items():
        if not known_equal(tensor.stride(-1), 1):
            return Refusal("layout", f"the last dimension of {name} is not contiguous")
    return None


def gapped(**tensors: Tensor | None) -> Refusal | None:
    """Refuse tensors that are not contiguous."""
    for name, tensor in tensors.items():
        stride: int | torch.SymInt = 1
        dimensions = () if tensor is None else zip(tensor.shape, tensor.stride(), strict=True)
        for size, step in reversed(list(dimensions)):
            if not known_equal(step, stride):
                return Refusal("layout", f"{name} is not contiguous")
            stride = stride * size
    return None


def scattered_slots(slots: Tensor) -> Refusal | None:
    if slots.dim() != 1 or not known_equal(slots.stride(0), 1):
        return Refusal("layout", "slots are not a contiguous vector")
    return None


def scattered_blocks(*caches: Tensor) -> Refusal | None:
    """Refuse a cache [blocks, block_size, ...] of several blocks whose slots are not equally far
    apart in memory.
    """
    for cache in caches:
        if not known_equal(cache.shape[0], 1) and not known_equal(
            cache.stride(0), cache.shape[1] * cache.stride(1)
        ):
            return Refusal("layout", "the blocks of the cache are not contiguous")
    return None


def unsupported(kernel: str, **arguments: Tensor | float | None) -> Refusal | None:
    """Refuse if one of these optional arguments is given; None, 0 and False count as absent."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) or value:
            return Refusal("argument", f"{kernel} does not support {name}")
    return None


def unknown(choices: Collection[str], **argument: str) -> Refusal | None:
    """Refuse an argument that is not one of these choices."""
    for name, value in argument.items():
        if value not in choices:
            return Refusal("argument", f"{name} {value!r} is not one of {tuple(choices)}")
    return None
