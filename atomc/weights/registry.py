"""The memory of parameters: one table, and the only code that allocates memory for a parameter.

    parameter -> Location: its address, the packed weight that contains it, and the weights that
    kernels prepared from it

| a kernel reads    | in memory                     | created by                                 |
|-------------------|-------------------------------|--------------------------------------------|
| the parameter     | at the parameter's address    | `parameter_of` (loader, quantization)      |
| a packed weight   | of its parameters (its rows)  | weights.packed, which moves the parameters |
| a prepared weight | of its own, or instead of the | weights.prepared, by the kernel's function |
|                   | parameter                     |                                            |

Where the runtime owns the weights, it frees parameters that no kernel reads, and prepared weights
stand for them (weights.freed).

The table holds parameters weakly and prepared weights strongly: an entry is removed with its
parameter. A user may move a parameter (`.data =`, `.to()`), so that its address changes; packed and
prepared weights are then created again.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atomc.errors import RunError
from atomc.ops.op import Prepared
from atomc.weights.snapshot import Snapshot


@dataclass(eq=False)
class PackedWeight:
    """A tensor whose rows are parameters, which own it: the last of them frees its memory."""

    whole: Callable[[], Tensor | None]
    parts: "list[Location]"

    def parameters(self) -> list[nn.Parameter]:
        """The parts in order; [] if one of them was freed or has moved."""
        alive = [part.parameter() for part in self.parts]
        held = [parameter for parameter in alive if parameter is not None]
        together = len(held) == len(self.parts) and self.whole() is not None
        return held if together and all(part.is_part_of(self) for part in self.parts) else []


@dataclass(eq=False)
class PreparedWeight:
    """Tensors that a kernel computed from parameters, such as another layout."""

    prepare: Callable[..., Prepared]
    parameters: "list[weakref.ref[nn.Parameter]]"
    snapshot: Snapshot
    tensors: tuple[Tensor, ...]

    def is_current_for(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it was computed from these parameters and their present values."""
        same = all(
            ref() is parameter for ref, parameter in zip(self.parameters, parameters, strict=True)
        )
        return same and self.snapshot.unchanged(parameters)


@dataclass(eq=False)
class Location:
    """The memory of one parameter, and the weights derived from it.

    address   of the memory that this module assigned last
    packed    the packed weight that contains it; None: its memory is its own
    prepared  the weights that kernels prepared from it, alone or with other parameters
    freed     it has no memory, only its prepared weights have
    read      a program of the runtime reads it as it is
    stands_for  the freed parameter in whose place modules have this one
    """

    parameter: "weakref.ref[nn.Parameter]"
    address: int
    packed: PackedWeight | None = None
    prepared: dict[Hashable, PreparedWeight] = field(default_factory=dict)
    freed: bool = False
    read: bool = False
    stands_for: nn.Parameter | None = None

    def is_part_of(self, packed: PackedWeight) -> bool:
        """Whether this packed weight contains the parameter, which has not been moved since."""
        parameter = self.parameter()
        return (
            self.packed is packed and parameter is not None and parameter.data_ptr() == self.address
        )


lock = threading.RLock()
_table: dict[int, Location] = {}  # by id of a parameter that is alive


def location_of(parameter: nn.Parameter) -> Location:
    """The parameter's entry; a new one, without packed or prepared weights, if there is none."""
    key = id(parameter)
    location = _table.get(key)
    if location is None:
        location = _table[key] = Location(
            weakref.ref(parameter, _forget_at_death(key)), parameter.data_ptr()
        )
    return location


def _forget_at_death(key: int) -> Callable[["weakref.ref[nn.Parameter]"], None]:
    table = _table  # when Python exits, a module may lose its names before its last parameter dies

    def forget(_: "weakref.ref[nn.Parameter]") -> None:
        gone = table.pop(key)
        for (
            prepared_key,
            prepared,
        ) in gone.prepared.items():  # one of several parameters is removed with the first of them
            for other in prepared.parameters:
                parameter = other()
                location = None if parameter is None else table.get(id(parameter))
                if location is not None:
                    location.prepared.pop(prepared_key, None)
        gone.prepared, gone.packed = (
            {},
            None,
        )  # a packed weight and its parts form a reference cycle

    return forget


def parameter_of(tensor: Tensor) -> nn.Parameter:
    """A parameter in the memory of the tensor, without gradient."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    location_of(parameter)
    return parameter


def move(parameter: nn.Parameter, memory: Tensor) -> Location:
    """Move the parameter to this memory, which already holds its values. Its old memory is freed if
    nothing shares it.
    """
    parameter.data = memory
    location = location_of(parameter)
    location.address, location.packed, location.freed = parameter.data_ptr(), None, False
    return location


def free(parameters: Sequence[nn.Parameter]) -> None:
    """Free the memory of one parameter, or of all parts of a packed weight. They keep their shapes,
    strides, dtypes and device; nothing may read them.
    """
    packed = location_of(parameters[0]).packed
    if packed is not None and (tensor := packed.whole()) is not None:
        shape_of_whole = tensor.to("meta")
        packed.whole = lambda: shape_of_whole
        del tensor
    for parameter in parameters:
        shape, stride = parameter.shape, parameter.stride()
        parameter.data = parameter.data.new_empty(0)  # first, as the next line allocates briefly
        memory = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=parameter.device)
        memory.untyped_storage().resize_(0)
        parameter.data = memory
        location = location_of(parameter)
        location.address, location.freed = parameter.data_ptr(), True
    for form in [form for part in parameters for form in location_of(part).prepared.values()]:
        form.snapshot = Snapshot([alive for ref in form.parameters if (alive := ref()) is not None])


def is_freed(parameter: nn.Parameter) -> bool:
    """Whether `free` took its memory, and it has been given no other memory since."""
    location = _table.get(id(parameter))
    return location is not None and location.freed and parameter.data_ptr() == location.address


def check_not_freed(parameters: Sequence[nn.Parameter]) -> None:
    """Raises RunError if the memory of one of these was freed."""
    if any(map(is_freed, parameters)):
        raise RunError(
            "this program reads a weight in another form than an earlier one of the same model, "
            "for which the original was freed: load the model again for it"
        )


def mark_read(parameter: nn.Parameter) -> None:
    """Keep this parameter's memory for a program of the runtime. Raises RunError if freed."""
    check_not_freed([parameter])
    location_of(parameter).read = True


def is_read(parameter: nn.Parameter) -> bool:
    """Whether `mark_read` was called."""
    return location_of(parameter).read


def register_prepared(key: Hashable, weight: PreparedWeight) -> None:
    """Add a prepared weight to the entry of each parameter, replacing an older one of this key."""
    for ref in weight.parameters:
        parameter = ref()
        assert parameter is not None
        location_of(parameter).prepared[key] = weight
