"""Bytes and FLOPs of one call of an op as formulas of its sizes: the rules that several ops share.

An op names its rule with `@op(cost=...)`; atomc.cost.cost applies them to a graph.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from atomc.ops.op_traits import Arguments

if TYPE_CHECKING:  # importing sympy is slow, and a start from the cache does not need it
    import sympy

Formula: TypeAlias = "sympy.Expr | float"
Work = tuple[Formula, Formula]  # bytes moved, floating-point operations


@dataclass(frozen=True)
class Operand:
    """A tensor of a call, by its symbolic sizes."""

    shape: tuple[Formula, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> Formula:
        return math.prod(self.shape)

    @property
    def bytes(self) -> Formula:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class OpCall:
    """One call of an op in a graph. `call["x"]` is the tensor argument x.

    arguments  by parameter, defaults included; an Operand for each tensor
    mutates    the parameters that the op writes in place
    reads      the tensors that it reads; the base of a view
    results    the tensors that it returns
    context    the tokens of each sequence in the state, including the new ones
    experts    of experts: among how many the router of its ids chooses; None: not known
    """

    arguments: Arguments
    mutates: tuple[str, ...]
    reads: tuple[Operand, ...]
    results: tuple[Operand, ...]
    context: Formula
    experts: int | None = None

    def __getitem__(self, name: str) -> Operand:
        operand = self.arguments[name]
        assert isinstance(operand, Operand)
        return operand


CostRule = Callable[[OpCall], Work]
# (call, the number of processes) -> the bytes that each of them sends to others.
SentRule = Callable[[OpCall, Formula], Formula]


def bytes_of(operands: Iterable[Operand]) -> Formula:
    return sum(operand.bytes for operand in operands)


def least(a: Formula, b: Formula) -> Formula:
    """The smaller of two formulas."""
    from sympy import Min

    return Min(a, b)


def read_and_write(call: OpCall) -> Work:
    """Each operand is read once, each result is written once; one operation per element of the
    results.
    """
    return bytes_of(call.reads) + bytes_of(call.results), sum(
        result.numel for result in call.results
    )


def sent_to_sum(size: Formula, processes: Formula) -> Formula:
    """The bytes that each process sends so that all have the sum of what each has: parts are summed
    by one process each, and gathered.
    """
    return 2 * (processes - 1) * size / processes


def sent_to_gather(own: Formula, processes: Formula) -> Formula:
    """The bytes that each process sends so that all have what each has."""
    return (processes - 1) * own


def sum_of_x(call: OpCall, processes: Formula) -> Formula:
    return sent_to_sum(call["x"].bytes, processes)


def gather_of_x(call: OpCall, processes: Formula) -> Formula:
    return sent_to_gather(call["x"].bytes, processes)


def product(call: OpCall) -> Work:
    """`x` [..., K] times each row of `weight` [..., N, K]; uint8 x has two codes per byte."""
    x, weight = call["x"], call["weight"]
    moved, _ = read_and_write(call)
    depth = x.shape[-1] * (2 if x.dtype == torch.uint8 else 1)
    return moved, 2 * math.prod(x.shape[:-1]) * depth * weight.shape[-2]


def distinct_experts(experts: Formula, chosen: Formula, tokens: Formula) -> Formula:
    """How many of so many experts T tokens hit, if each chooses uniformly."""
    return experts * (1 - (1 - chosen / experts) ** tokens)


def experts(call: OpCall) -> Work:
    """Of weights [E, ...] only the experts that are hit are read. `w13` and `w2` are multiplied by
    the rows of `ids` [T, k] that choose one of them; a width without its codes is that of the
    activations.
    """
    ids, w13, w2 = call["ids"], call["w13"], call["w2"]
    (tokens, chosen), (count, hidden) = ids.shape, w2.shape[:2]
    among = count if call.experts is None else call.experts
    share = 1 if among == count else count / among
    operands = {name: x for name, x in call.arguments.items() if isinstance(x, Operand)}
    weights = [x for name, x in operands.items() if is_of_experts(name)]
    rows = [x for name, x in operands.items() if not is_of_experts(name)]
    hit = share * distinct_experts(among, chosen, tokens)
    moved = bytes_of([*rows, *call.results]) + hit * bytes_of(weights) / count
    inner = w13.shape[1] / 2
    return moved, 2 * tokens * chosen * share * 3 * hidden * inner


def is_of_experts(name: str) -> bool:
    """Whether a parameter is a weight, scale or bias of all experts, [E, ...]."""
    return name.startswith(("w13", "w2", "b13", "b2"))


def lookup(call: OpCall) -> Work:
    """Reads the indices, and only those rows of the table that it returns."""
    indices = [operand for operand in call.reads if not operand.dtype.is_floating_point]
    return bytes_of(indices) + 2 * bytes_of(call.results), 0


def state_write(call: OpCall) -> Work:
    """Reads its rows, and writes one row per element of `slots` [T] into the caches, which are not
    read.
    """
    rows = [
        x
        for name, x in call.arguments.items()
        if isinstance(x, Operand) and name not in call.mutates
    ]
    caches = [
        x
        for name in call.mutates
        if isinstance(x := call.arguments[name], Operand) and len(x.shape) >= 3
    ]
    written = sum(
        call["slots"].shape[0] * math.prod(x.shape[2:]) * x.dtype.itemsize for x in caches
    )
    return bytes_of([*rows, *call.results]) + written, sum(result.numel for result in call.results)
