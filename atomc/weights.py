"""Where parameters live: one table, and the only code that gives a parameter memory.

    parameter -> Location: its address; the packed weight whose rows it is; what kernels prepared from it

| a kernel reads    | which is                                     | made by                                     |
|-------------------|----------------------------------------------|---------------------------------------------|
| the parameter     | memory at its one address                    | `parameter_of`: the loader and quantization |
| a packed weight   | the same memory: parameters are its rows     | atomc.packed_weights, which moves them there         |
| a prepared weight | memory beside the parameter, or in its place | atomc.prepared_weights, as the kernel says            |

The table holds parameters weakly and prepared weights strongly: an entry goes with its parameter. A parameter that others
move (`.data =`, `.to()`) does not lie at its address any more; what was packed or prepared is then made again.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from atomc.torch_compat.names import WeakTensor
from atomc.weight_snapshot import Snapshot


@dataclass(eq=False)
class PackedWeight:
    """A tensor whose rows are parameters. It belongs to them: the memory is freed with the last one."""

    whole: WeakTensor
    parts: "list[Location]"

    def parameters(self) -> list[nn.Parameter]:
        """The parts in order, [] if one of them is gone or has moved."""
        found = [part.parameter() for part in self.parts]
        held = [parameter for parameter in found if parameter is not None]
        together = len(held) == len(self.parts) and self.whole() is not None
        return held if together and all(part.holds(self) for part in self.parts) else []


@dataclass(eq=False)
class PreparedWeight:
    """What a kernel made of parameters: another layout, beside them or in their place.

    replaces  the kernel reads these tensors only, so that the parameters' memory may be freed if nothing else reads it
    """

    parameters: "list[weakref.ref[nn.Parameter]]"
    snapshot: Snapshot
    tensors: tuple[Tensor, ...]
    replaces: bool

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it was made of these, as they are now."""
        same = all(ref() is parameter for ref, parameter in zip(self.parameters, parameters, strict=True))
        return same and self.snapshot.holds(parameters)


@dataclass(eq=False)
class Location:
    """Where one parameter lives, and what was made of it.

    address   of the memory that it was given last
    packed    the packed weight of which it is rows; None: the memory is its own
    prepared  what kernels made of it, alone or with others
    """

    parameter: "weakref.ref[nn.Parameter]"
    address: int
    packed: PackedWeight | None = None
    prepared: dict[Hashable, PreparedWeight] = field(default_factory=dict)

    def holds(self, packed: PackedWeight) -> bool:
        """Whether the parameter is rows of this packed weight, and nobody has moved it."""
        parameter = self.parameter()
        return self.packed is packed and parameter is not None and parameter.data_ptr() == self.address


lock = threading.RLock()
_table: dict[int, Location] = {}  # by id of the parameter, as long as that lives


def location_of(parameter: nn.Parameter) -> Location:
    """The parameter's entry; one that the table does not know has memory of its own."""
    key = id(parameter)
    found = _table.get(key)
    if found is None:
        found = _table[key] = Location(weakref.ref(parameter, _forgetting(key)), parameter.data_ptr())
    return found


def _forgetting(key: int) -> Callable[[Any], None]:
    def forget(_: Any) -> None:
        gone = _table.pop(key)
        for made, prepared in gone.prepared.items():  # those made of several go with the first of them
            for other in prepared.parameters:
                parameter = other()
                if parameter is not None:
                    location_of(parameter).prepared.pop(made, None)
        gone.prepared, gone.packed = {}, None  # at once: a pack and its parts refer to each other

    return forget


def parameter_of(tensor: Tensor) -> nn.Parameter:
    """A parameter that lives where the tensor does, without gradient."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    location_of(parameter)
    return parameter


def move(parameter: nn.Parameter, memory: Tensor) -> Location:
    """Let the parameter live in this memory, which has its values; what it had is free if nothing else holds it."""
    parameter.data = memory
    location = location_of(parameter)
    location.address, location.packed = parameter.data_ptr(), None
    return location


def keep(key: Hashable, made: PreparedWeight) -> None:
    """Enter what was prepared at each of its parameters, in the place of what was there by this key."""
    for ref in made.parameters:
        parameter = ref()
        assert parameter is not None
        location_of(parameter).prepared[key] = made
