"""Packed weights: parameters that are rows of one tensor, so that one kernel reads them together.

    q.weight [N, K], k.weight [M, K]
    =>  packed [N + M, K], where q.weight is packed[:N] and k.weight is packed[N:]

    experts.w13 [E, 2I, K], shared.gate [I, K], shared.up [I, K]
    =>  packed [E + 1, 2I, K], whose last row, [2I, K], is shared.gate over shared.up

The parts share the memory of the packed weight through DLPack: each part has its own storage, as
Dynamo and safetensors require, and an in-place write to a part writes the packed weight. The parts
own the packed weight: it is freed with the last of them. An assignment of new memory (`.data =`,
`.to()`) removes a parameter from its packed weight, so a reader must call `pack` before each use.

Rows of zeros may follow the parts, which makes the number of rows one that kernels are fast for.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from atomc.torch_compat.core import Input, WeakTensor, outside_of_tracing, storage_use_count
from atomc.weights import registry as weights
from atomc.weights.registry import PackedWeight, location_of


class PackedInput(NamedTuple):
    """A packed weight that a graph reads: the names of its parameters, and the number of rows of
    zeros after them.
    """

    parts: tuple[str, ...]
    zero_rows: int = 0


def pack(parameters: Sequence[nn.Parameter], zero_rows: int = 0) -> Tensor | str:
    """The packed weight of these parameters, created if needed; a string with the reason if they
    cannot be packed.
    """
    with weights.lock:
        existing = location_of(parameters[0]).packed
        parts = existing.parameters() if existing is not None else []
        if existing is not None and list(map(id, parts)) == list(map(id, parameters)):
            packed = existing.whole()
            assert packed is not None
            if packed.shape[0] != _num_rows(parameters) + zero_rows:
                return "another graph reads them with another number of zeros behind them"
            return packed
        return packing_problem(parameters) or _move_into_one_tensor(parameters, zero_rows)


def packed_together(parameter: nn.Parameter) -> list[nn.Parameter]:
    """All parameters of the packed weight that contains this one; [] if it is not packed."""
    with weights.lock:
        packed = location_of(parameter).packed
        return packed.parameters() if packed is not None else []


def packing_problem(parameters: Sequence[nn.Parameter]) -> str | None:
    """Why these cannot be packed, or None."""
    return mismatch(parameters) or packed_with_others(parameters)


def mismatch(parameters: Sequence[Tensor]) -> str | None:
    """Why dtypes, devices or shapes of these parameters allow no packed weight, or None."""
    for parameter in parameters:
        reason = unpackable(parameter)
        if reason:
            return reason
    first, *others = parameters
    for other in others:
        alike = (other.dtype, other.device) == (first.dtype, first.device)
        if not alike or (first.dim() < 3 and other.shape[1:] != first.shape[1:]):
            return f"{_describe(first)} and {_describe(other)} differ"
    if sum(other.numel() for other in others) % math.prod(first.shape[1:]):
        return f"{', '.join(map(_describe, others))} are no whole rows of {_describe(first)}"
    return None


def concatenated(parameters: Sequence[Tensor], zero_rows: int = 0) -> Tensor:
    """A tensor with these parameters as rows of the first, and so many rows of zeros after them."""
    row = parameters[0].shape[1:]
    zeros = parameters[0].new_zeros(zero_rows * math.prod(row))
    return torch.cat([*(parameter.flatten() for parameter in parameters), zeros]).view(-1, *row)


def _num_rows(parameters: Sequence[Tensor]) -> int:
    """Together, as rows of the first."""
    return sum(part.numel() for part in parameters) // math.prod(parameters[0].shape[1:])


def packed_with_others(parameters: Sequence[nn.Parameter]) -> str | None:
    """Why these cannot be packed: one is already packed with others; else None."""
    for parameter in parameters:
        together = packed_together(parameter)
        if together and {id(p) for p in together} != {id(p) for p in parameters}:
            return f"it is already packed with {len(together) - 1} other parameters"
    return None


def unpackable(parameter: Input) -> str | None:
    """Why this cannot be part of any packed weight, or None."""
    # That of a DTensor is a Tensor, and an instance of nn.Parameter.
    if type(parameter) not in (Tensor, nn.Parameter) or not isinstance(parameter, nn.Parameter):
        return f"it is a {type(parameter).__name__}, not a parameter"
    if parameter.layout != torch.strided or not parameter.is_contiguous() or parameter.dim() == 0:
        return "it is not contiguous, or has no rows"
    if parameter.is_meta:
        return None
    if weights.is_freed(parameter):
        packed = location_of(parameter).packed
        return None if packed is not None else "its memory was freed after it was prepared alone"
    if parameter.is_inference():
        return "it was created in inference mode, where torch does not allow it to be moved"
    # Other tensors in this memory must continue to see writes to the parameter.
    if parameter.untyped_storage().nbytes() != parameter.nbytes:
        return "it is part of a larger storage"
    if storage_use_count(parameter) > 1:
        return (
            "another tensor shares its memory (a state_dict in use, or weights tied through .data)"
        )
    if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
        return "it is shared between processes"
    return None


def _describe(parameter: Tensor) -> str:
    return (
        f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)} on "
        f"{parameter.device}"
    )


def _move_into_one_tensor(parameters: Sequence[nn.Parameter], zero_rows: int) -> Tensor:
    """Move the parameters into one tensor. Their old memory is freed before this returns."""
    first = parameters[0]
    with outside_of_tracing():
        if first.is_meta:
            return concatenated(parameters, zero_rows).detach()
        sizes, rows = [parameter.numel() for parameter in parameters], _num_rows(parameters)
        shape = (rows + zero_rows, *first.shape[1:])
        tensor = torch.empty(shape, dtype=first.dtype, device=first.device)
        packed = PackedWeight(WeakTensor(tensor), [])
        start = 0
        with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
            for parameter, count in zip(parameters, sizes, strict=True):
                part = tensor.view(-1).narrow(0, start, count).view(parameter.shape)
                part.copy_(parameter)
                # The capsule keeps `part` alive, and `part` its base: so the parts own the packed
                # weight.
                packed.parts.append(weights.move(parameter, torch.utils.dlpack.from_dlpack(part)))
                start += count
            tensor[rows:].zero_()
    for location in packed.parts:
        location.packed = packed
    return tensor
