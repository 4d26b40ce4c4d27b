"""Parameters that lie one behind the other in one tensor, the pack, so that one kernel can read them at once.

    q.weight [N, K], k.weight [M, K]    =>    pack [N + M, K];  q.weight is pack[:N], k.weight pack[N:]

The parts share the pack's memory through DLPack: each has a storage of its own, as Dynamo and safetensors want it, and a
change in place is a change of the pack. The pack belongs to its parts: it is freed with the last of them. What gives a
parameter new memory (`.data =`, `.to()`) takes it out of the pack; whoever reads a pack asks here first.
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from atomc.torch_compat.names import WeakTensor, num_owners, outside_of_tracing


@dataclass
class _Pack:
    """A pack and where its parts lie in it. It holds neither."""

    whole: WeakTensor
    parts: list["weakref.ref[nn.Parameter]"]
    pointers: list[int]

    def holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are its parts, in order, and none has moved."""
        return len(parameters) == len(self.parts) and all(
            part() is parameter and parameter.data_ptr() == pointer
            for part, parameter, pointer in zip(self.parts, parameters, self.pointers, strict=True)
        )


_pack_of: dict[int, _Pack] = {}  # by id of the parameter, as long as that lives
_lock = threading.RLock()


def packed(parameters: Sequence[nn.Parameter]) -> Tensor | str:
    """The pack of these parameters, made if there is none; or why there can be none."""
    with _lock:
        known = _pack_of.get(id(parameters[0]))
        whole: Tensor | None = known.whole() if known is not None and known.holds(parameters) else None
        if whole is not None:
            return whole
        return refusal(parameters) or _pack(parameters)


def partners(parameter: nn.Parameter) -> list[nn.Parameter]:
    """The parameters of the pack in which this one lies, itself among them; none if it lies in no pack."""
    with _lock:
        pack = _pack_of.get(id(parameter))
        if pack is None or pack.whole() is None:
            return []
        parts = [part for weak in pack.parts if (part := weak()) is not None]
        return parts if pack.holds(parts) else []


def refusal(parameters: Sequence[Any]) -> str | None:
    """Why these cannot be packed, or None."""
    return unlike(parameters) or packed_otherwise(parameters)


def unlike(parameters: Sequence[Any]) -> str | None:
    """Why these do not fit together in one pack, or None."""
    for parameter in parameters:
        reason = unfit(parameter)
        if reason:
            return reason
    first = parameters[0]
    for other in parameters[1:]:
        if (other.dtype, other.device, other.shape[1:]) != (first.dtype, first.device, first.shape[1:]):
            return f"{_spell(first)} beside {_spell(other)}"
    return None


def packed_otherwise(parameters: Sequence[nn.Parameter]) -> str | None:
    """Why these cannot be packed: one of them is packed with others already; or None."""
    for parameter in parameters:
        together = partners(parameter)
        if together and {id(p) for p in together} != {id(p) for p in parameters}:
            return f"it is packed with {len(together) - 1} other parameters already"
    return None


def unfit(parameter: Any) -> str | None:
    """Why this cannot be part of any pack, or None."""
    if type(parameter) is not nn.Parameter:
        return f"it is no parameter but a {type(parameter).__name__}"
    if parameter.layout != torch.strided or not parameter.is_contiguous() or parameter.dim() == 0:
        return "it does not lie in rows, one behind the other"
    if parameter.is_meta:
        return None
    if parameter.is_inference():
        return "it was made in inference mode, where torch lets nobody move it"
    # Whoever else looks at this memory must go on seeing what happens to the parameter.
    if parameter.untyped_storage().nbytes() != parameter.nbytes:
        return "it is part of a larger storage"
    if num_owners(parameter) > 1:
        return "another tensor shares its memory (a state_dict that somebody holds, or weights tied through .data)"
    if parameter.device.type == "cpu" and parameter.is_shared():  # type: ignore[no-untyped-call]
        return "it is shared between processes"
    return None


def _spell(parameter: Tensor) -> str:
    return f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)} on {parameter.device}"


def _pack(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Copy the parameters into one tensor and point them there. Their old memory is free when this returns."""
    first = parameters[0]
    with outside_of_tracing():
        if first.is_meta:
            return torch.cat(list(parameters)).detach()
        rows = [len(parameter) for parameter in parameters]
        whole = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        start = 0
        with torch.cuda.device_of(whole):  # type: ignore[no-untyped-call]
            for parameter, count in zip(parameters, rows, strict=True):
                part = whole.narrow(0, start, count)
                part.copy_(parameter)
                # The capsule keeps `part` alive, and that its base: so the parts own the pack.
                parameter.data = torch.utils.dlpack.from_dlpack(part)
                start += count
        pack = _Pack(WeakTensor(whole), [_watched(p) for p in parameters], [p.data_ptr() for p in parameters])
    for parameter in parameters:
        _pack_of[id(parameter)] = pack
    return whole


def _watched(parameter: nn.Parameter) -> "weakref.ref[nn.Parameter]":
    key = id(parameter)

    def forget(_: Any) -> None:
        _pack_of.pop(key, None)

    return weakref.ref(parameter, forget)


class Packs:
    """The packs that a callable reads, found among its arguments before each call.

    groups  the numbers of the arguments that make a pack, in order
    notes   gets a line if a pack can no longer be made
    """

    def __init__(self, groups: Sequence[Sequence[int]], notes: list[str]):
        self.groups, self.notes = [list(group) for group in groups], notes
        self.parts = [i for group in self.groups for i in group]
        # Where the parts lay, and the packs; None if a group has none.
        self._known: tuple[list[int], list[WeakTensor]] | None = None

    def __call__(self, args: Sequence[Any]) -> list[Tensor]:
        """One tensor per group. As long as no argument has moved, this only compares pointers."""
        known = self._known
        if known is not None and [args[i].data_ptr() for i in self.parts] == known[0]:
            wholes = [whole for weak in known[1] if (whole := weak()) is not None]
            if len(wholes) == len(known[1]):
                return wholes
        return self._find(args)

    def _find(self, args: Sequence[Any]) -> list[Tensor]:
        found, pointers, joined = [], [], False
        with _lock:  # nobody packs the same parameters anew while we write down where they lie
            for group in self.groups:
                parts = [args[i] for i in group]
                whole = packed(parts)
                if isinstance(whole, str):
                    joined = True
                    note = f"weights are joined anew in each call, which is slow: {whole}"
                    if note not in self.notes:
                        self.notes.append(note)
                    whole = torch.cat(parts)
                found.append(whole)
                pointers += [part.data_ptr() for part in parts]
        self._known = None if joined else (pointers, [WeakTensor(whole) for whole in found])
        return found
