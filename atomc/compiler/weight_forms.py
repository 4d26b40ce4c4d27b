"""Chooses the forms in which weights are held in memory: the original, or what kernels prepare from
it.

The owner of a module (torch.compile) keeps the originals. Where the runtime owns the weights, it
holds what its kernels read, and frees originals that none of them reads. Each further form of a
weight is a copy. There is none of experts and, in the runtime on a GPU, none of a weight of SMALL
bytes or more; all other copies together take at most MOST_COPIED of the memory. What an op of
Kind.WEIGHT computes is no copy, but another weight: a graph has it where it reads it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch.fx import GraphModule, Node

from atomc.graph.op_call import arguments_of, called_op
from atomc.ops.op import Kernel, Prepared, Refusal, op_of
from atomc.ops.op_traits import Kind
from atomc.platform import Platform
from atomc.token_range import Tokens

# The fraction of the machine's memory that copies of weights may take.
MOST_COPIED = 0.25
# Norms and scales of a layer take less, and shall not decide which kernels run.
SMALL = 2**20
# The parameters of ops of experts that are most of their bytes; others are scales, zeros, biases.
EXPERTS = ("w13", "w2")

# The function that prepares it; None for the original.
Form = Callable[..., Prepared] | None


class Use(NamedTuple):
    """A graph input that a kernel reads: the parameter of the op, the input, and its form."""

    name: str
    weight: Node
    form: Form


class Held(NamedTuple):
    """The only forms of a weight that are held, and why there are no others."""

    forms: tuple[Form, ...]
    why: str


class Chooser(Protocol):
    """Chooses kernels for one range of token counts."""

    tokens: Tokens

    def first(self, node: Node) -> Kernel | None:
        """The kernel that would run this node, None for the op's reference."""


# A node in the graph of a range of token counts, and what chooses its kernel.
Reader = tuple[Chooser, Node]


@dataclass
class Reading:
    """How a weight is read: the parameter of the first op, the readers, and the forms with the
    first reader of each.
    """

    name: str
    weight: Node
    readers: list[Reader] = field(default_factory=list)
    forms: dict[Form, str] = field(default_factory=dict)


class WeightForms:
    """The forms of the weights of one graph.

    owned    the runtime owns the weights
    earlier  the forms of each weight whose original the runtime freed for an earlier program
    stored   the weights whose original an earlier program reads
    """

    def __init__(
        self,
        platform: Platform,
        *,
        owned: bool = False,
        earlier: Mapping[str, tuple[Form, ...]] | None = None,
        stored: Sequence[str] = (),
    ):
        self.platform, self.owned, self.stored = platform, owned, set(stored)
        self.earlier = dict(earlier or {})
        why = "the original was freed for another program of this model"
        self.held = {name: Held(forms, why) for name, forms in self.earlier.items()}

    def refuses(self, kernel: Kernel, node: Node) -> Refusal | None:
        """Why a form that this kernel reads is not held, or None."""
        if not kernel.prepare and not self.held:
            return None
        computes = Kind.WEIGHT in called_op(node).kind
        for use in uses(node, kernel):
            if computes and use.weight.name not in self.earlier:
                continue
            if use.form is not None and not self.owned and _is_expert(use.name, node):
                return Refusal(
                    "copy",
                    f"it needs `{use.name}` in another layout, and experts are held once, as the "
                    "owner of the module has them (a model that the runtime loads is held in the "
                    "layout of its kernels)",
                )
            held = self.held.get(use.weight.name)
            if held is not None and use.form not in held.forms:
                return Refusal("copy", held.why)
        return None

    def settle(self, graphs: Iterable[tuple[GraphModule, Chooser]]) -> None:
        """Decide which forms are held, by the kernels that would be chosen in the graph of each
        range of token counts.

        A weight of one form has the one that its first reader in the first range prefers, or the
        original if a reader has no kernel for that one.
        """
        readers: list[Reader] = []
        for gm, chooser in graphs:
            for node in gm.graph.nodes:
                if _may_prepare(node):
                    if Kind.WEIGHT not in called_op(node).kind:
                        readers.append((chooser, node))
                else:
                    self.stored |= {operand.name for operand in node.all_input_nodes}
        # What is refused for one weight may change the form of another.
        while readers and self._restrict(readers):
            pass

    def _restrict(self, readers: Sequence[Reader]) -> bool:
        """Restrict each weight to the forms that may be held; whether anything changed."""
        before, copied = dict(self.held), 0
        for name, reading in _readings(readers).items():
            if name in self.earlier:
                continue
            original = not self.owned or name in self.stored
            held = self._select(reading, None if original else next(iter(reading.forms)), copied)
            if None not in held.forms and not self._serves(held, reading):
                held = self._select(reading, None, copied)
            copied += (len(held.forms) - 1) * _nbytes(reading.weight)
            if name in before and before[name].forms == held.forms:
                continue  # with its reason
            if name in before or not reading.forms.keys() <= set(held.forms):
                self.held[name] = held
        return self.held != before

    def _select(self, reading: Reading, first: Form, copied: int) -> Held:
        """This form, and those others that it may have as copies. copied: bytes of other copies."""
        forms, size = [first], _nbytes(reading.weight)
        why = self._once(reading, first)
        for form in reading.forms:
            total = copied + len(forms) * size
            if form in forms or self._only_one(reading):
                continue
            if self.platform.memory and total > MOST_COPIED * self.platform.memory:
                why = (
                    f"copies of weights would take {total / 1e9:.1f} GB, more than "
                    f"{MOST_COPIED:.0%} of this machine's memory"
                )
                continue
            forms.append(form)
        return Held(tuple(forms), why)

    def _only_one(self, reading: Reading) -> bool:
        """Whether no copy of this weight may be held."""
        if any(_is_expert(reading.name, node) for _, node in reading.readers):
            return True
        return self.owned and not self.platform.is_cpu and _nbytes(reading.weight) >= SMALL

    def _once(self, reading: Reading, form: Form) -> str:
        reader = reading.forms.get(form, "another op")
        return (
            f"it needs `{reading.name}` in another layout than {reader} reads, and this weight is "
            "held once"
        )

    def _serves(self, held: Held, reading: Reading) -> bool:
        """Whether each reader has a kernel for these forms."""
        name = reading.weight.name
        before = self.held.get(name)
        self.held[name] = held
        try:
            return all(
                use.form in held.forms
                for chooser, node in reading.readers
                for use in uses(node, chooser.first(node))
                if use.weight.name == name
            )
        finally:
            if before is None:
                del self.held[name]
            else:
                self.held[name] = before


def uses(node: Node, kernel: Kernel | None) -> Iterator[Use]:
    """The graph inputs that this kernel, None for the reference, reads for an op's node."""
    arguments = arguments_of(node)
    # A prepared weight is passed for the first of its parameters, the others as they are.
    prepared = {names[0]: prepare for names, prepare in kernel.prepares.items()} if kernel else {}
    for name, argument in arguments.items():
        for weight in argument if isinstance(argument, list | tuple) else [argument]:
            if not isinstance(weight, Node) or weight.op != "placeholder":
                continue
            if name in prepared:
                yield Use(name, weight, prepared[name])
            if name not in prepared or (kernel is not None and kernel.keeps_original):
                yield Use(name, weight, None)


def _readings(readers: Sequence[Reader]) -> dict[str, Reading]:
    """How each graph input is read, in the order of ranges and nodes."""
    readings: dict[str, Reading] = {}
    for chooser, node in readers:
        kernel = chooser.first(node)
        reader = f"{kernel.provider if kernel else 'the reference'} for {chooser.tokens} tokens"
        for use in uses(node, kernel):
            reading = readings.setdefault(use.weight.name, Reading(use.name, use.weight))
            reading.forms.setdefault(use.form, reader)
            if (chooser, node) not in reading.readers:
                reading.readers.append((chooser, node))
    return readings


def _may_prepare(node: Node) -> bool:
    op = op_of(node.target)
    return op is not None and any(kernel.prepare for kernel in op.kernels)


def _is_expert(name: str, node: Node) -> bool:
    return name in EXPERTS and Kind.EXPERTS in called_op(node).kind


def _nbytes(weight: Node) -> int:
    fake = weight.meta["val"]
    if not hasattr(fake, "shape"):  # a size
        return 0
    return math.prod(size for size in fake.shape if isinstance(size, int)) * int(
        fake.element_size()
    )
