"""Calls of the case table with one argument changed: its numbers at other places in memory, in another
dtype, or an attribute of another case.
"""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from aiter_cases import KERNELS, cases
from kernel_cases.draw import Draw
from torch import Tensor

from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform

Arguments = dict[str, Any]
Make = Callable[[], Arguments]
Change = Callable[[Tensor], Tensor]
# Other dtypes that an op takes in the place of one. Scales are fp32, and steps have integers of one
# width.
OTHERS = {
    torch.bfloat16: (torch.float16, torch.float32),
    torch.float8_e4m3fn: (torch.float8_e4m3fnuz, torch.bfloat16),
}
OF_CACHES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# They count what other arguments have.
COUNTS = ("k", "nope")
# Of a step: the runtime makes them, contiguous.
VECTORS = ("query_start", "seq_lens")
# Columns between what is moved apart.
GAP = 8


def placed(x: Tensor, dim: int, step: int = 1, more: int = 0) -> Tensor:
    """The numbers of x, so many times further apart in a dimension, and other numbers behind it."""
    sizes, index = list(x.shape), [slice(None)] * x.dim()
    index[dim] = slice(0, step * sizes[dim], step)
    sizes[dim] = step * sizes[dim] + more
    memory = x.new_empty(sizes)
    memory.view(torch.uint8).fill_(0x41)
    memory[tuple(index)].copy_(x)
    return memory[tuple(index)]


def swapped(x: Tensor, dim: int) -> Tensor:
    """The numbers of x, in memory with this dimension and the one before it exchanged."""
    return x.transpose(dim - 1, dim).contiguous().transpose(dim - 1, dim)


def changes(x: Tensor) -> Iterator[tuple[str, Change]]:
    """Of one tensor."""
    for dim in range(-x.dim(), 0):
        yield f"spread in dimension {dim}", partial(placed, dim=dim, step=2)
        yield f"with {GAP} more in dimension {dim}", partial(placed, dim=dim, more=GAP)
    yield "with 1 more in the last dimension", partial(placed, dim=-1, more=1)
    for dim in range(1 - x.dim(), 0):
        yield f"with dimensions {dim - 1} and {dim} exchanged", partial(swapped, dim=dim)
    for dtype in OTHERS.get(x.dtype, ()):
        yield f"in {dtype}", partial(Tensor.to, dtype=dtype)


def row_stride(x: Tensor) -> int:
    """Numbers from the start of a row to the next, of x cut from rows."""
    expected = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if size > 1 and stride != expected:
            return stride
        expected *= size
    return expected


def relaid(parts: list[Tensor], columns: int, starts: list[int], together: bool) -> list[Tensor]:
    """Parts of the same rows, in rows of so many columns, where they start at these. together: in
    one memory; otherwise each in one of its own.
    """
    stride = row_stride(parts[0])
    rows = parts[0].untyped_storage().nbytes() // parts[0].element_size() // stride
    memory, views = parts[0].new_zeros((rows + 1) * columns), []
    for part, start in zip(parts, starts, strict=True):
        strides = [s // stride * columns if s >= stride else s for s in part.stride()]
        place = part.storage_offset() // stride * columns + start
        of_part = memory if together else memory.clone()
        views.append(of_part.as_strided(part.shape, strides, place))
        views[-1].copy_(part)
    return views


def row_changes(
    parts: list[Tensor],
) -> Iterator[tuple[str, Callable[[list[Tensor]], list[Tensor]]]]:
    """Of tensors that are parts of the same rows."""
    stride = row_stride(parts[0])
    starts = [part.storage_offset() % stride for part in parts]
    sizes = [b - a for a, b in zip(starts, [*starts[1:], stride], strict=True)]
    moved = [start + GAP * i for i, start in enumerate(starts)]
    mirrored = [stride - start - size for start, size in zip(starts, sizes, strict=True)]
    for change, columns, places, together in (
        ("in wider rows", stride + GAP, starts, True),
        ("with gaps between them", stride + GAP * len(parts), moved, True),
        ("in falling order", stride, mirrored, True),
        ("each in rows of its own", stride, starts, False),
    ):
        yield change, partial(relaid, columns=columns, starts=places, together=together)


def drawn(kernel: Kernel, make: Callable[[Draw], Arguments]) -> Arguments:
    return make(Draw(torch.bfloat16, layout=kernel.layout or "paged"))


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    return {key: x for key, x in arguments.items() if isinstance(x, Tensor)}


@functools.cache
def all_cases(name: str) -> dict[str, Make]:
    """The cases of a kernel's op."""
    kernel = KERNELS[name]
    return {case: partial(drawn, kernel, make) for case, make in cases(kernel, "gfx950").items()}


@functools.cache
def smallest_cases(name: str, platform: Platform, *further: str) -> dict[str, Make]:
    """For each tensor, the smallest case with it that the kernel takes; and these further ones."""
    smallest: dict[Any, tuple[int, str]] = {}
    experts = "experts" in name
    for case, make in all_cases(name).items():
        arguments = make()
        tensors = tensors_of(arguments)
        if not next(iter(tensors.values())).shape[0] or refusal(KERNELS[name], platform, arguments):
            continue
        size = sum(x.numel() for x in tensors.values())
        kinds = {(key, len(parts)) for parts in shared_rows(arguments) for key in parts}
        # Stand-ins for experts take long: one case has each of their tensors.
        for kind in kinds | {(key, None if experts else x.dtype) for key, x in tensors.items()}:
            smallest[kind] = min(smallest.get(kind, (size, case)), (size, case))
    names = sorted({*(case for _, case in smallest.values()), *further})
    return {case: all_cases(name)[case] for case in names}


def shared_rows(arguments: Arguments) -> list[list[str]]:
    """The names of tensors that are parts of the same rows."""
    names: dict[int, list[str]] = {}
    for key, x in tensors_of(arguments).items():
        if x.numel():
            names.setdefault(x.untyped_storage().data_ptr(), []).append(key)
    ordered = (
        sorted(keys, key=lambda key: arguments[key].storage_offset()) for keys in names.values()
    )
    return [keys for keys in ordered if len(keys) > 1]


def changed_calls(
    name: str, key: str, platform: Platform, *further: str
) -> Iterator[tuple[str, Make]]:
    """A text and the arguments of each call with a change of this argument, by itself or with those
    of the same dtype, or of the same rows.
    """
    values, tensors = {}, {}
    for make in all_cases(name).values():
        arguments = make()
        if isinstance(value := arguments.get(key), Tensor):
            tensors.setdefault((value.dtype, value.shape), value)
        elif key in arguments and key not in COUNTS:
            values[str(value)] = value
    for case, make in smallest_cases(name, platform, *further).items():
        arguments = make()
        value = arguments.get(key)
        if not isinstance(value, Tensor):
            for other in [*values.values(), *tensors.values()]:
                yield f"{case}: {key}={other}", partial(with_value, make, {key: other})
            continue
        if key in VECTORS:
            continue
        for change, function in changes(value):
            yield f"{case}: {key} {change}", partial(with_changes, make, [key], function)
        alike = [k for k, x in tensors_of(arguments).items() if x.dtype == value.dtype]
        caches = [k for k in alike if k.endswith("_cache")]
        for keys, dtypes in ((alike, OTHERS.get(value.dtype, ())), (caches, OF_CACHES)):
            for dtype in dtypes if keys[:1] == [key] else ():
                change = partial(Tensor.to, dtype=dtype)
                yield f"{case}: {keys} in {dtype}", partial(with_changes, make, keys, change)
        for keys in shared_rows(arguments):
            if keys[0] == key:
                for change, relay in row_changes([arguments[k] for k in keys]):
                    yield f"{case}: {keys} {change}", partial(with_rows, make, keys, relay)


def with_changes(make: Make, keys: list[str], change: Change) -> Arguments:
    arguments = make()
    return arguments | {key: change(arguments[key]) for key in keys}


def with_value(make: Make, values: Arguments) -> Arguments:
    return make() | values


def with_rows(make: Make, keys: list[str], relay: Any) -> Arguments:
    arguments = make()
    return arguments | dict(zip(keys, relay([arguments[key] for key in keys]), strict=True))
