"""What a compiled graph reads of weights beside its own inputs: packed ones, then what kernels prepared from them.

`take` finds or makes them. Under torch.compile the weights are the user's, who may write or move them between two calls:
`follow` looks for that before each call. The runtime takes them once.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from atomc import weights
from atomc.packed_weights import packed
from atomc.prepared_weights import Prepare, prepared
from atomc.torch_compat.names import WeakTensor
from atomc.weight_snapshot import Snapshot
from atomc.weights import PreparedWeight


class Wanted(NamedTuple):
    """A prepared weight that a graph reads, by numbers of its inputs: the tensors that it is made of, None where there is
    none, and the parameters that these are or are packed of."""

    weights: tuple[int | None, ...]
    parts: tuple[int, ...]
    prepare: Prepare


class WeightInputs:
    """The packed and prepared weights that a callable reads, found among its arguments.

    groups  number of a packed weight -> numbers of the arguments that make it, in order
    wanted  the prepared weights; they may be made of packed ones, whose numbers follow those of the arguments
    read    the numbers of the arguments and packed weights that the callable reads themselves
    notes   gets a line if a pack can no longer be made, and when weights changed
    """

    def __init__(
        self, groups: Mapping[int, Sequence[int]], wanted: Sequence[Wanted], read: Container[int], notes: list[str]
    ):
        self.groups, self.wanted, self.read, self.notes = groups, list(wanted), read, notes
        self._packed_parts = [i for group in self.groups.values() for i in group]
        self._prepared_parts = [i for one in self.wanted for i in one.parts]
        # Where the parts of packs lay, and the packs; None if a group has none.
        self._packs: tuple[list[int], list[WeakTensor]] | None = None
        self._snapshot: Snapshot | None = None
        self._prepared: list[PreparedWeight] = []

    def follow(self, args: Sequence[Any]) -> list[Any]:
        """As `take`. As long as no weight has changed, this only compares addresses, counts of writes and samples."""
        packs = self.settle(args)
        if not self.wanted:
            return packs
        parameters = [args[i] for i in self._prepared_parts]
        if self._snapshot is None or not self._snapshot.holds(parameters):
            with weights.lock:
                snapshot = Snapshot(parameters)  # of before: what is written from now on is seen at the next call
                self._prepare([*args, *packs])
                self._snapshot = snapshot
        return [*packs, *(one.tensors for one in self._prepared)]

    def take(self, args: Sequence[Any]) -> list[Any]:
        """One tensor for each packed weight, a tuple of them for each prepared one: found, or made of these arguments.

        Parameters move into packs that are new.
        """
        packs = self._pack(args)
        self._prepare([*args, *packs])
        return [*packs, *(one.tensors for one in self._prepared)]

    def settle(self, args: Sequence[Any]) -> list[Any]:
        """The packed weights. Parameters that have left a pack may move into a new one."""
        known = self._packs
        if known is not None and [args[i].data_ptr() for i in self._packed_parts] == known[0]:
            wholes = [whole for weak in known[1] if (whole := weak()) is not None]
            if len(wholes) == len(known[1]):
                return wholes
        return self._pack(args)

    def _pack(self, args: Sequence[Any]) -> list[Any]:
        found, addresses, joined = [], [], False
        with weights.lock:  # nobody packs the same parameters anew while we write down where they lie
            for group in self.groups.values():
                parts = [args[i] for i in group]
                whole = packed(parts)
                if isinstance(whole, str):
                    joined = True
                    self._say(f"weights are joined anew in each call, which is slow: {whole}")
                    whole = torch.cat(parts)
                found.append(whole)
                addresses += [part.data_ptr() for part in parts]
        self._packs = None if joined else (addresses, [WeakTensor(whole) for whole in found])
        return found

    def _prepare(self, inputs: Sequence[Any]) -> None:
        found = []
        for given, parts, prepare in self.wanted:
            tensors = [None if i is None else inputs[i] for i in given]
            entry, renewed = prepared([inputs[i] for i in parts], tensors, prepare)
            found.append(entry)
            if renewed:
                self._say("weights changed after compiling, and what kernels had made of them was made anew")
        self._prepared = found

    def replaced(self) -> list[int]:
        """The arguments for which the callable reads prepared weights only: an owner may free their memory."""
        made = list(zip(self.wanted, self._prepared, strict=False))  # on meta nothing is
        replaced = [i for one, entry in made if entry.replaces for i in one.parts]
        kept = {i for one, entry in made if not entry.replaces for i in one.parts}
        kept |= {i for number, group in self.groups.items() if number in self.read for i in group}
        return [i for i in dict.fromkeys(replaced) if i not in self.read and i not in kept]

    def copied_bytes(self, args: Sequence[Any]) -> int:
        """Of the weights that kernels prepare, whether or not that was done."""
        return sum(args[i].nbytes for _, parts in {(one.prepare, one.parts) for one in self.wanted} for i in parts)

    def note(self) -> str:
        """For the report: how many prepared tensors there are, and how large."""
        distinct = {id(x): x for one in self._prepared for x in one.tensors}
        size = sum(x.nbytes for x in distinct.values()) / 2**20
        return f"{len(distinct)} copies of weights for kernels take {size:.1f} MiB beside the originals"

    def _say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
