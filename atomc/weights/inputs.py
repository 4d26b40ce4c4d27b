"""Additional weight inputs of a compiled graph: packed weights, then the weights that kernels
prepared from them.

`materialize` finds or creates them. Under torch.compile the user owns the weights and may write or
move them between two calls: `refresh` checks for that before each call. The runtime calls
`materialize` once.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from atomc.torch_compat.core import Input, WeakTensor
from atomc.weights import registry as weights
from atomc.weights.packed import concatenated, pack, packed_with_others
from atomc.weights.prepared import Attributes, Prepare, prepared_weight
from atomc.weights.registry import PreparedWeight
from atomc.weights.snapshot import Snapshot


class PreparedInput(NamedTuple):
    """A prepared weight that a graph reads.

    weights  the input numbers of the tensors that `prepare` takes; None for an absent one
    parts    the input numbers of the parameters that these are, or are packed from
    attributes, bytes, keeps_original  as in Extra
    """

    weights: tuple[int | None, ...]
    parts: tuple[int, ...]
    prepare: Prepare
    attributes: Attributes = ()
    bytes: int | None = None
    keeps_original: bool = False


class WeightInputs:
    """The packed and prepared weights that a callable reads, computed from its arguments.

    groups  number of a packed weight -> numbers of the arguments that it consists of, in order
    prepared_inputs  may read packed weights, whose numbers follow those of the arguments
    read    the numbers of the arguments and packed weights that the callable reads directly
    notes   receives a line if parameters can no longer be packed, and when weights change
    zero_rows  number of a packed weight -> how many rows of zeros it has after its parts
    """

    def __init__(
        self,
        groups: Mapping[int, Sequence[int]],
        prepared_inputs: Sequence[PreparedInput],
        read: Container[int],
        notes: list[str],
        zero_rows: Mapping[int, int] | None = None,
    ):
        self.groups, self.prepared_inputs, self.read, self.notes = (
            groups,
            list(prepared_inputs),
            read,
            notes,
        )
        self._zero_rows = zero_rows or {}
        self._packed_parts = [i for group in self.groups.values() for i in group]
        self._prepared_parts = [i for one in self.prepared_inputs for i in one.parts]
        # Addresses of the parts, and the packed weights; None if a group could not be packed.
        self._packed: tuple[list[int], list[WeakTensor]] | None = None
        self._snapshot: Snapshot | None = None
        self._prepared: list[PreparedWeight] = []

    def refresh(self, args: Sequence[Input]) -> list[Tensor | tuple[Tensor, ...]]:
        """As `materialize`; unchanged weights cost a look at addresses, writes and samples."""
        packed = self.refresh_packed(args)
        if not self.prepared_inputs:
            return [*packed]
        parameters = _parameters(args, self._prepared_parts)
        if self._snapshot is None or not self._snapshot.unchanged(parameters):
            with weights.lock:
                snapshot = Snapshot(
                    parameters
                )  # taken first: the next call detects writes from here on
                self._prepare([*args, *packed])
                self._snapshot = snapshot
        return [*packed, *(one.tensors for one in self._prepared)]

    def materialize(self, args: Sequence[Input]) -> list[Tensor | tuple[Tensor, ...]]:
        """One tensor per packed weight and a tuple of tensors per prepared weight, found or
        computed from these arguments.

        Parameters move into newly packed weights.
        """
        packed = self._pack(args)
        self._prepare([*args, *packed])
        return [*packed, *(one.tensors for one in self._prepared)]

    def materialize_and_free(self, args: Sequence[Input]) -> list[Tensor | tuple[Tensor, ...]]:
        """As `materialize`, for weights that the runtime owns: originals that the callable does not
        read are freed, each as soon as the last weight is prepared from it.

        Raises RunError if this needs an original that was freed for another program.
        """
        with weights.lock:
            for parameter in self._read_parameters(args):
                weights.mark_read(parameter)
            packed = self._pack(args)
            groups, self._prepared = self.replaced_groups(args), []
            for number, one in enumerate(self.prepared_inputs):
                self._prepared.append(self._prepared_of(one, [*args, *packed]))
                left = {i for later in self.prepared_inputs[number + 1 :] for i in later.parts}
                for group in groups:
                    if left.isdisjoint(group) and not set(group).isdisjoint(one.parts):
                        packed.clear()
                        weights.free(_parameters(args, group))
                        packed = self._pack(args)
            return [*packed, *(one.tensors for one in self._prepared)]

    def refresh_packed(self, args: Sequence[Input]) -> list[Tensor]:
        """The packed weights. Parameters that were moved by the user are packed again."""
        record = self._packed
        if record is not None and record[0] == [
            part.data_ptr() for part in _parameters(args, self._packed_parts)
        ]:
            packed = [tensor for weak in record[1] if (tensor := weak()) is not None]
            if len(packed) == len(record[1]):
                return packed
        return self._pack(args)

    def _pack(self, args: Sequence[Input]) -> list[Tensor]:
        tensors, addresses, apart = [], [], False
        with (
            weights.lock
        ):  # no other thread packs these parameters while their addresses are recorded
            for number, group in self.groups.items():
                parts, zero_rows = _parameters(args, group), self._zero_rows.get(number, 0)
                packed = pack(parts, zero_rows)
                if isinstance(packed, str):
                    weights.check_not_freed(parts)
                    apart = True
                    self._note(f"weights are concatenated in each call, which is slow: {packed}")
                    packed = concatenated(parts, zero_rows)
                tensors.append(packed)
                addresses += [part.data_ptr() for part in parts]
        self._packed = None if apart else (addresses, [WeakTensor(packed) for packed in tensors])
        return tensors

    def _prepare(self, inputs: Sequence[Any]) -> None:
        self._prepared = [self._prepared_of(one, inputs) for one in self.prepared_inputs]

    def _prepared_of(self, one: PreparedInput, inputs: Sequence[Any]) -> PreparedWeight:
        tensors = [None if i is None else inputs[i] for i in one.weights]
        parameters = [inputs[i] for i in one.parts]
        entry, renewed = prepared_weight(parameters, tensors, one.prepare, one.attributes)
        if renewed:
            self._note("weights changed after compiling, so kernels prepared them again")
        return entry

    def replaced_groups(self, args: Sequence[Input]) -> list[list[int]]:
        """The arguments of which the callable reads only prepared weights, so that their owner may
        free their memory: single ones, and all parts of a packed weight.
        """
        read = {id(parameter) for parameter in self._read_parameters(args)}
        in_groups = {i for group in self.groups.values() for i in group}
        single = [[i] for i in dict.fromkeys(self._prepared_parts) if i not in in_groups]
        replaced = []
        for group in [*map(list, self.groups.values()), *single]:
            parts = _parameters(args, group)
            if all(
                i in self._prepared_parts and id(part) not in read and not weights.is_read(part)
                for i, part in zip(group, parts, strict=True)
            ) and not packed_with_others(parts):
                replaced.append(group)
        return replaced

    def _read_parameters(self, args: Sequence[Input]) -> list[nn.Parameter]:
        """The parameters that the callable reads as they are, or as parts of a packed weight."""
        numbers = [i for i in range(len(args)) if i in self.read]
        numbers += [
            i for packed, group in self.groups.items() if packed in self.read for i in group
        ]
        numbers += [i for one in self.prepared_inputs if one.keeps_original for i in one.parts]
        return [x for i in numbers if isinstance(x := args[i], nn.Parameter)]

    def prepared_bytes(self, args: Sequence[Input]) -> int:
        """Bytes of the weights that kernels prepare, prepared already or not."""
        distinct = {
            (one.prepare, one.attributes, one.parts): one for one in self.prepared_inputs
        }.values()
        return sum(
            bytes_of([one.parts], args) if one.bytes is None else one.bytes for one in distinct
        )

    def note(self, freed: int = 0) -> str:
        """For the report: the number and size of the prepared tensors, and the bytes of originals
        that were freed.
        """
        distinct = {id(x): x for one in self._prepared for x in one.tensors}
        size = sum(x.nbytes for x in distinct.values()) / 2**20
        instead = f"; {freed / 2**20:.1f} MiB of originals are freed" if freed else ""
        return (
            f"{len(distinct)} prepared weights take {size:.1f} MiB"
            f"{instead or ' in addition to the originals'}"
        )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def bytes_of(groups: Iterable[Iterable[int]], args: Sequence[Input]) -> int:
    """Bytes of these arguments."""
    return sum(x.nbytes for group in groups for x in _parameters(args, group))


def _parameters(args: Sequence[Any], numbers: Iterable[int]) -> list[nn.Parameter]:
    """The arguments that the compiled graph reads as weights. Runs in each call: without checks."""
    return [args[i] for i in numbers]
