"""Kernels may touch the tensors that they were given, and nothing else, and read what somebody
wrote.

The interpreter of Triton reads whatever lies at an address, and fresh memory is mostly zeros: what
is harmless there is wrong or a fault on a GPU.
"""

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PoisonedMemory(TorchDispatchMode):
    """Memory that a kernel asks for without a value is NaN, or bytes of ones, so that what it
    leaves unwritten shows.
    """

    UNINITIALIZED = frozenset(
        {
            torch.ops.aten.empty.memory_format,
            torch.ops.aten.empty_like.default,
            torch.ops.aten.empty_strided.default,
            torch.ops.aten.new_empty.default,
            torch.ops.aten.new_empty_strided.default,
        }
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self.UNINITIALIZED and out.numel():
            out.fill_(
                float("nan") if out.is_floating_point() else 255 if out.dtype == torch.uint8 else -1
            )
        return out


class OutOfBounds(Exception):
    """A kernel touches memory that is none of its tensors'."""


class Memory:
    """The memory of one launch: its tensors, each from its first to its last element."""

    def __init__(self, arguments: Any):
        held = sorted({extent(x) for x in tensors(arguments) if x.numel()})
        self.starts = np.array([start for start, _ in held], dtype=np.uint64)
        self.ends = np.maximum.accumulate(np.array([end for _, end in held], dtype=np.uint64))

    def outside(self, pointers: Any, mask: Any) -> Any:
        """Which of the addresses that `mask` lets through are none of a tensor's, in the shape of
        the pointers.
        """
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = pointers.data.astype(np.uint64)
        before = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (
            (before >= 0) & (addresses + np.uint64(size) <= self.ends[before])
            if len(self.ends)
            else False
        )
        return np.broadcast_to(mask.data, addresses.shape).astype(bool) & ~np.asarray(inside)

    def check(self, pointers: Any, mask: Any, verb: str) -> None:
        """Raises OutOfBounds with the first of the addresses outside, if there is one."""
        outside = self.outside(pointers, mask)
        if outside.any():
            address = np.uint64(pointers.data[outside].flat[0])
            ends = self.ends[self.ends <= address]
            where = (
                f"{address - ends[-1]} bytes behind the end"
                if len(ends)
                else "before the beginning"
            )
            raise OutOfBounds(
                f"{outside.sum()} of {outside.size} elements are {verb} outside, {where} of a "
                "tensor"
            )


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def tensors(arguments: Any) -> list[torch.Tensor]:
    found = []
    for argument in arguments:
        argument = getattr(
            argument, "base", argument
        )  # of what Triton wraps: another dtype, a descriptor
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, tuple):
            found += tensors(argument)
    return found


def check_bounds(poison: bool = False) -> None:
    """From now on each launch in this process raises OutOfBounds where its kernel leaves its
    tensors.

    poison  it may read what lies outside, and finds bytes of ones there: NaN, -1. A result that it
            does not touch is right.
    """
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    memory = Memory(())
    prepare, load, store = (
        executor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )
    swap, update = builder.create_atomic_cas, builder.create_atomic_rmw
    splat = builder.create_splat

    def spread(self, kind, value):
        """By itself it makes numbers of a truth value, which from Triton 3.9 on are no mask."""
        found = splat(self, kind, value)
        is_bool = value.data.dtype == bool
        return interpreter.TensorHandle(found.data.astype(bool), found.dtype) if is_bool else found

    def prepared(self, args, kwargs):
        nonlocal memory
        given = prepare(self, args, kwargs)
        memory = Memory((*given[0], *given[1].values()))
        return given

    def loaded(self, pointers, mask, *rest, **options):
        if not poison:
            memory.check(pointers, mask, "read")
            return load(self, pointers, mask, *rest, **options)
        outside = memory.outside(pointers, mask)
        mask = interpreter.TensorHandle(
            np.broadcast_to(mask.data, outside.shape) & ~outside, mask.dtype
        )
        found = load(self, pointers, mask, *rest, **options)
        found.data.view(np.uint8).reshape(*outside.shape, -1)[outside] = 0xFF
        return found

    def stored(self, pointers, value, mask, *rest, **options):
        memory.check(pointers, mask, "written")
        return store(self, pointers, value, mask, *rest, **options)

    def swapped(self, pointer, *rest):
        memory.check(pointer, interpreter.TensorHandle(np.ones(1, dtype=bool), None), "swapped")
        return swap(self, pointer, *rest)

    def updated(self, operation, pointers, value, mask, *rest):
        memory.check(pointers, mask, "updated")
        return update(self, operation, pointers, value, mask, *rest)

    executor._init_args_hst = prepared
    builder.create_masked_load, builder.create_masked_store = loaded, stored
    builder.create_splat = spread
    builder.create_atomic_cas, builder.create_atomic_rmw = swapped, updated
