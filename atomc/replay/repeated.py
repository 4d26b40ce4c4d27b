"""A compiled graph whose calls are repeated from the fourth one of a kind on.

All that the second and the third call of a kind launch is recorded. What both did alike is fixed;
addresses that differ are temporaries. Later calls of that kind launch the same with temporaries of
their own, and nothing else: no shapes, no checks, no choice of tiles.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from atomc.errors import first_line
from atomc.replay.bound import Libraries
from atomc.replay.recording import Recording, Unrepeatable, record
from atomc.replay.tape import Tape, tape_of
from atomc.report.report_data import RepeatedCall
from atomc.torch_compat.captured_kernels import Node, captured_kernels
from atomc.torch_compat.core import (
    GraphFunction,
    Input,
    Outputs,
    profiler_is_on,
    without_autocast,
    without_torch_functions,
)
from atomc.torch_compat.launches import current_stream, launches_are_hooked

# Kinds of calls that are repeated; others run as they are.
MOST_KINDS = 64
# What recordings may keep from being freed; above it the device is slower than the host.
MOST_BYTES = 4 * 2**30
MOST_BYTES_ON_CPU = 2**28
# Calls of a kind that are compared with the one before, until two are alike: the first ones of a
# process measure and compile.
MOST_ATTEMPTS = 4
# Kernels and vendors' libraries choose other code for addresses that no multiple of it divides.
ALIGNMENT = 16
_recording = threading.Lock()


@dataclass
class _Attempt:
    """The latest recording of a kind of calls, and how many there were; none of the first call."""

    recording: Recording | None = None
    number: int = 0


@dataclass(eq=False)
class Repeated:
    """A callable that repeats calls of the same kind: with the same numbers, and with tensors of
    the same layouts, aligned alike. Results are those of `call`, in memory of their own.

    call     the graph. All that it does on the device are launches by Triton and Inductor, and ops
             of PyTorch; what it does depends on nothing but the kind.
    device   of its kernels
    dynamic  whether the layouts of tensors other than parameters vary; Dynamo's guards fix others
    notes    gets why a kind is not repeated
    records  gets what each kind launches
    strict   raise bugs of atomc instead of noting them
    fixed    numbers of inputs whose layouts do not vary, besides parameters
    """

    call: GraphFunction
    device: torch.device
    dynamic: bool
    notes: list[str]
    records: list[RepeatedCall] = field(default_factory=list)
    strict: bool = True
    fixed: Container[int] = ()
    tapes: dict[Hashable, Tape | None] = field(default_factory=dict)
    untimed: dict[Hashable, RepeatedCall] = field(default_factory=dict)
    attempts: dict[Hashable, _Attempt] = field(default_factory=dict)
    # Set by the first call: numbers of the inputs that are no tensors, of those of them that are
    # prepared weights, and of tensors whose layouts vary; and whether none of the calls can be
    # repeated.
    scalars: list[int] | None = None
    prepared: list[int] = field(default_factory=list)
    varying: list[int] = field(default_factory=list)
    never: bool = False
    weights: list[int] = field(default_factory=list)  # the identities of the prepared ones

    def __call__(self, *args: Input) -> Outputs:
        if self.scalars is None:
            self._inspect(args)
        if self.never or _is_watched():
            return self.call(*args)
        if self.prepared:
            self._forget_old_weights(args)
        # A default device is a mode that each call of a tensor's method would pass through.
        with without_torch_functions():
            addresses = self._addresses(args)
            kind = self._kind(args, addresses)
            if tape := self.tapes.get(kind):
                entry = self.untimed.pop(kind, None) if self.untimed else None
                if entry is None:
                    return self._repeat(tape, args, addresses)
                return self._timed(entry, lambda: self._repeat(tape, args, addresses))
        return self.call(*args) if kind in self.tapes else self._recorded(kind, args)

    def _inspect(self, args: Sequence[Input]) -> None:
        tensors = {i: x for i, x in enumerate(args) if isinstance(x, Tensor)}
        self.scalars = [i for i in range(len(args)) if i not in tensors]
        self.prepared = [i for i in self.scalars if isinstance(args[i], tuple)]
        if self.dynamic:
            self.varying = [i for i, x in tensors.items() if type(x) is Tensor]
            self.varying = [i for i in self.varying if i not in self.fixed]
        if reason := self._refused([*tensors.values()]):
            self.never = True
            self._note(reason)

    def _refused(self, tensors: Sequence[Tensor]) -> str | None:
        """Why calls with inputs like these cannot be repeated."""
        kinds = {type(x).__name__ for x in tensors} - {"Tensor", "Parameter", "Buffer"}
        kinds |= {str(x.layout) for x in tensors} - {"torch.strided"}
        devices = {x.device for x in tensors if x.dim()}
        if kinds:
            return f"an input is a {min(kinds)}"
        if not devices <= {self.device}:
            return f"inputs on {', '.join(sorted(map(str, devices)))}"
        return None

    def _forget_old_weights(self, args: Sequence[Input]) -> None:
        """Forget what reads weights that were prepared before a user wrote the parameters."""
        weights = [id(args[i]) for i in self.prepared]
        if weights != self.weights:
            self.weights = weights
            self.tapes.clear()
            self.untimed.clear()
            self.attempts.clear()
            self.records.clear()

    def _addresses(self, args: Sequence[Input]) -> Sequence[int]:
        if self.scalars:
            return [x.data_ptr() if isinstance(x, Tensor) else 0 for x in args]
        return [*map(Tensor.data_ptr, args)]  # type: ignore[arg-type]

    def _repeat(self, tape: Tape, args: Sequence[Input], addresses: Sequence[int]) -> Outputs:
        # Recorded ops have the dtypes that autocast has chosen.
        with without_autocast():
            if self.device.type == "cpu" or self.device.index == torch.cuda.current_device():
                return tape.run(args, addresses, current_stream(self.device))
            with torch.cuda.device(self.device):
                return tape.run(args, addresses, current_stream(self.device))

    def _timed(self, record: RepeatedCall, repeat: Callable[[], Outputs]) -> Outputs:
        """Repeat a call, and record its time on the host."""
        start = time.perf_counter()
        outputs = repeat()
        record["host_ms"] = 1e3 * (time.perf_counter() - start)
        return outputs

    def _kind(self, args: Sequence[Input], addresses: Sequence[int]) -> Hashable:
        aligned: Hashable = reduce(or_, addresses, 0) % ALIGNMENT == 0
        if not aligned:
            aligned = tuple([address % ALIGNMENT for address in addresses])
        layouts = [(x.shape, x.stride()) for i in self.varying if isinstance(x := args[i], Tensor)]
        return (aligned, *[args[i] for i in self.scalars or ()], *layouts)

    def _recorded(self, kind: Hashable, args: Sequence[Input]) -> Outputs:
        """Call the graph, and compare what it does with its last call of this kind."""
        if len(self.tapes) >= MOST_KINDS:
            self._give_up(kind, f"{MOST_KINDS} kinds of calls are repeated already")
            return self.call(*args)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self.call(*args)
        if kind not in self.attempts:  # it may never come again
            self._attempt(kind, _Attempt())
            return self.call(*args)
        if not _recording.acquire(blocking=False):  # of another thread: it watches launchers
            return self.call(*args)
        try:
            outputs, recording = record(self.call, args, self._most_bytes())
        finally:
            _recording.release()
        last = self.attempts.pop(kind, _Attempt())
        if isinstance(recording, str):
            self._give_up(kind, recording)
            return outputs
        if last.recording is None:
            self._attempt(kind, _Attempt(recording, last.number + 1))
            return outputs
        try:
            tape = self.tapes[kind] = self._tape(last.recording, recording, args)
            entry = self.untimed[kind] = RepeatedCall(
                kernels=tape.kernels,
                ops=tape.ops,
                direct=tape.direct,
                bytes=tape.bytes,
                host_ms=0.0,
            )
            self.records.append(entry)
        except Unrepeatable as why:
            if last.number + 1 < MOST_ATTEMPTS:
                self._attempt(kind, _Attempt(recording, last.number + 1))
            else:
                self._give_up(kind, str(why))
        except Exception as bug:  # the call has succeeded, whatever it is that cannot repeat it
            if self.strict:
                raise
            self._give_up(kind, f"a bug of atomc, please report it: {type(bug).__name__}: {bug}")
        return outputs

    def _tape(self, first: Recording, second: Recording, args: Sequence[Input]) -> Tape:
        """What repeats the call. Raises Unrepeatable if CUDA sees other kernels in it."""
        if self.device.type != "cuda":
            return tape_of(first, second)
        with torch.cuda.device(self.device):
            expected = self._captured(lambda: self.call(*args))
            repeated = self._captured(self._repeating(tape_of(first, second, shared=False), args))
            if expected != repeated:
                missing = (expected - repeated).total()
                message = f"{missing} of {expected.total()} kernels are launched unseen"
                raise Unrepeatable(message)
            plain = tape_of(first, second)
            direct = tape_of(first, second, libraries=Libraries(self.device))
            expected = self._captured(self._repeating(plain, args))
            return direct if self._captured(self._repeating(direct, args)) == expected else plain

    def _repeating(self, tape: Tape, args: Sequence[Input]) -> Callable[[], object]:
        addresses = self._addresses(args)
        return lambda: self._repeat(tape, args, addresses)

    def _captured(self, call: Callable[[], object]) -> Counter[Node]:
        try:
            return captured_kernels(call, self.device)
        except RuntimeError as error:
            raise Unrepeatable(first_line(error)) from error

    def _give_up(self, kind: Hashable, reason: str) -> None:
        if len(self.tapes) < 2 * MOST_KINDS:
            self.tapes[kind] = None
        self._note(reason)

    def _note(self, reason: str) -> None:
        note = f"calls are not repeated without their Python: {reason}"
        if note not in self.notes:
            self.notes.append(note)

    def _most_bytes(self) -> int:
        """How much memory recordings may keep from being freed."""
        if self.device.type != "cuda":
            return MOST_BYTES_ON_CPU
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(MOST_BYTES, free // 4)

    def _attempt(self, kind: Hashable, attempt: _Attempt) -> None:
        """Keep an attempt, and forget the oldest ones, or at least their recordings if all take too
        much memory: their kinds of calls did not come again.
        """
        self.attempts[kind] = attempt
        if len(self.attempts) > MOST_KINDS:
            del self.attempts[next(iter(self.attempts))]
        left = self._most_bytes() if attempt.recording else 0
        for one in reversed(self.attempts.values()) if attempt.recording else ():
            left -= one.recording.bytes if one.recording else 0
            if left < 0:
                one.recording = None


def _is_watched() -> bool:
    """Whether a profiler, a mode, a transform or a hook acts on each op of a call."""
    return (
        profiler_is_on()
        or bool(torch._C._len_torch_dispatch_stack())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or launches_are_hooked()
    )
