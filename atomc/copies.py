"""What kernels made of weights before the first step, such as another layout: copies that must follow the weights.

A copy belongs to its parameters, as a pack does: every graph that wants the same shares it, and it goes with them. Whoever
reads one asks here first. A parameter has changed if it lies elsewhere (`.data =`, `.to()`), if torch counts a write
(`copy_`, load_state_dict, an optimizer), or if one of a few numbers all over it differs: of a write through `.data` torch
counts nothing, and that is how adapters are merged.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from atomc.op import Prepared
from atomc.torch_compat.names import outside_of_tracing

# Zen 4, one thread, matrices of 512 x 512, a call where nothing changed: 33 copies take 0.03 ms, 197 take 0.20.
SAMPLES = 64

Prepare = Callable[..., Prepared]
State = tuple[int, int, int]
Bits = npt.NDArray[np.unsignedinteger[Any]]
NOTHING: Bits = np.zeros(0, np.uint8)


class Wanted(NamedTuple):
    """A copy that a graph reads, by numbers of its inputs: the weights it is made of, None where there is none, and the
    parameters that these are or are packed of."""

    weights: tuple[int | None, ...]
    parts: tuple[int, ...]
    prepare: Prepare


class _Copy:
    """What one function made of its weights, and the state of the parameters when it did."""

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = [weakref.ref(parameter) for parameter in parameters]
        self.state: list[State] = []
        self.samples: list[Bits] = []
        self.sampled: Bits = NOTHING
        self.tensors: tuple[Tensor, ...] = ()

    def belongs_to(self, parameters: Sequence[nn.Parameter]) -> bool:
        return all(ref() is parameter for ref, parameter in zip(self.parameters, parameters, strict=True))

    def is_of(self, parameters: Sequence[nn.Parameter]) -> bool:
        return self.state == list(map(_state, parameters)) and _unchanged(self.samples, self.sampled)

    def make(self, parameters: Sequence[nn.Parameter], weights: Sequence[Tensor | None], prepare: Prepare) -> None:
        self.samples = [bits for parameter in parameters if (bits := _samples(parameter)) is not None]
        self.sampled = np.concatenate([NOTHING, *self.samples])
        self.state = list(map(_state, parameters))
        self.tensors = prepare(*weights).tensors


_copies: dict[Any, _Copy] = {}  # by function and ids of the parameters, as long as these live
_lock = threading.RLock()


def unfit(weight: Any) -> str | None:
    """Why no copy of this can be kept, or None."""
    if not isinstance(weight, nn.Parameter):
        return "it is no parameter, and may be another tensor at each call"
    if weight.is_inference():
        return "it was made in inference mode, where torch counts no writes"
    return None


def _state(parameter: nn.Parameter) -> State:
    return id(parameter), parameter.data_ptr(), parameter._version


def _samples(parameter: nn.Parameter) -> Bits | None:
    """Numbers of each part and many columns of a parameter, on the CPU: on a GPU looking would wait for the device.

    They are read where they lie and own nothing: look only at those of a parameter that has not moved.
    """
    if parameter.device.type != "cpu" or not parameter.is_contiguous() or not parameter.numel():
        return None
    step = max(1, parameter.numel() // SAMPLES)
    step -= step > 2 and step % 2 == 0  # an odd one meets more columns
    memory = memoryview((ctypes.c_char * parameter.nbytes).from_address(parameter.data_ptr())).cast("B")
    return np.frombuffer(memory, f"u{min(parameter.itemsize, 8)}")[::step]


def _unchanged(samples: Sequence[Bits], sampled: Bits) -> bool:
    return bool(np.array_equal(np.concatenate([NOTHING, *samples]), sampled))


class Copies:
    """The copies that a callable reads, found among its arguments before each call.

    wanted  one for each, in order
    notes   gets a line whenever weights changed and copies were made anew
    """

    def __init__(self, wanted: Sequence[Wanted], notes: list[str]):
        self.wanted, self.notes = list(wanted), notes
        self.numbers = [i for copy in wanted for i in copy.parts]
        self._state: list[State] | None = None
        self._samples: list[Bits] = []
        self._sampled: Bits = NOTHING
        self._made: list[tuple[Tensor, ...]] = []

    def __call__(self, inputs: Sequence[Any]) -> list[tuple[Tensor, ...]]:
        """One tuple for each of `wanted`, made of these inputs of the graph if there is none or the weights changed."""
        if self._state == [_state(inputs[i]) for i in self.numbers] and _unchanged(self._samples, self._sampled):
            return self._made
        with _lock, outside_of_tracing():
            found = [self._current([inputs[i] for i in parts], [None if i is None else inputs[i] for i in weights], prepare)
                     for weights, parts, prepare in self.wanted]  # fmt: skip
            distinct = list({id(copy): copy for copy in found}.values())
            self._samples = [bits for copy in distinct for bits in copy.samples]
            self._sampled = np.concatenate([NOTHING, *(copy.sampled for copy in distinct)])
            self._state = [state for copy in found for state in copy.state]
            self._made = [copy.tensors for copy in found]
            return self._made

    def _current(
        self, parameters: Sequence[nn.Parameter], weights: Sequence[Tensor | None], prepare: Prepare
    ) -> _Copy:
        key = (prepare, *map(id, parameters))
        copy = _copies.get(key)
        if copy is None or not copy.belongs_to(parameters):
            copy = _copies[key] = _Copy(parameters)
            for parameter in parameters:
                weakref.finalize(parameter, _copies.pop, key, None).atexit = False
        elif copy.is_of(parameters):
            return copy
        else:
            self._say_renewed()
        copy.make(parameters, weights, prepare)
        return copy

    def _say_renewed(self) -> None:
        note = "weights changed after compiling, and what kernels had made of them was made anew"
        if note not in self.notes:
            self.notes.append(note)

    def note(self) -> str:
        """For the report: how many copies there are, and how large."""
        distinct = {id(x): x for tensors in self._made for x in tensors}
        size = sum(x.nbytes for x in distinct.values()) / 2**20
        return f"{len(distinct)} copies of weights for kernels take {size:.1f} MiB beside the originals"
