"""Parameters that lie one behind the other in one tensor, the pack, so that one kernel can read them at once.

    q.weight [N, K], k.weight [M, K]    =>    pack [N + M, K];  q.weight is pack[:N], k.weight pack[N:]

The parts share the pack's memory through DLPack: each has a storage of its own, as Dynamo and safetensors want it, and a
change in place is a change of the pack. The pack belongs to its parts: it is freed with the last of them. What gives a
parameter new memory (`.data =`, `.to()`) takes it out of the pack; every reader of a pack asks here first.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn

from atomc import weights
from atomc.torch_compat.names import WeakTensor, num_owners, outside_of_tracing
from atomc.weights import PackedWeight, location_of


def packed(parameters: Sequence[nn.Parameter]) -> Tensor | str:
    """The pack of these parameters, made if there is none; or why there can be none."""
    with weights.lock:
        known = location_of(parameters[0]).packed
        held = known.parameters() if known is not None else []
        if known is not None and list(map(id, held)) == list(map(id, parameters)):
            whole: Tensor = known.whole()
            return whole
        return refusal(parameters) or _pack(parameters)


def partners(parameter: nn.Parameter) -> list[nn.Parameter]:
    """The parameters of the pack in which this one lies, itself among them; none if it lies in no pack."""
    with weights.lock:
        pack = location_of(parameter).packed
        return pack.parameters() if pack is not None else []


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
    """Copy the parameters into one tensor and move them there. Their old memory is free when this returns."""
    first = parameters[0]
    with outside_of_tracing():
        if first.is_meta:
            return torch.cat(list(parameters)).detach()
        rows = [len(parameter) for parameter in parameters]
        whole = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        pack = PackedWeight(WeakTensor(whole), [])
        start = 0
        with torch.cuda.device_of(whole):  # type: ignore[no-untyped-call]
            for parameter, count in zip(parameters, rows, strict=True):
                part = whole.narrow(0, start, count)
                part.copy_(parameter)
                # The capsule keeps `part` alive, and that its base: so the parts own the pack.
                pack.parts.append(weights.move(parameter, torch.utils.dlpack.from_dlpack(part)))
                start += count
    for location in pack.parts:
        location.packed = pack
    return whole
