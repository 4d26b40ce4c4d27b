"""What the compiler must know of an op beyond its reference, declared with `@op(...)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Protocol

import torch
from torch import Tensor

from atomc.ops.state import StateSpec

# The arguments of a call by parameter, of the types in the op's signature. Tensors are fake ones
# while a graph is compiled, and proxies while a replacement is traced.
Arguments = Mapping[str, Any]


class Kind(Flag):
    """What an op does. A fused op is the union of what it joins: `Kind.NORM | Kind.QUANTIZE`."""

    LINEAR = auto()  # a product of rows with a stored weight
    BMM = auto()  # a product per head
    ATTENTION = auto()
    NORM = auto()
    GATE = auto()  # a gated activation; its first two parameters are the gate and what it gates
    ROPE = auto()
    QUANTIZE = auto()
    LOOKUP = auto()  # rows of a table; its first two parameters are the indices and the table
    STATE_WRITE = auto()
    COLLECTIVE = auto()  # needs all processes of a group
    OTHER = auto()


@dataclass(frozen=True)
class QuantizedWeight:
    """How the weight of a linear is stored.

    format  as reports name it: "fp8", "int4"
    scales  (arguments by name, tensors are fake) -> what shares a scale, for reports: "a scale an
            output"
    codes   how many codes one element of the stored weight holds
    rate    products per second, relative to the peak of bf16
    stored  the parameters that hold it: first the codes, then what gives them back; one may be None
            in a call
    """

    format: str
    scales: Callable[[Arguments], str]
    codes: int
    rate: int
    stored: tuple[str, ...] = ("weight", "weight_scale")


class StepFields(Protocol):
    """Tensors of a step: those of atomc.ops.Step, and of the layer's own group those of
    GroupStep.
    """

    query_start: Tensor
    seq_lens: Tensor
    state_slots: Tensor
    slots: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class StateBinding:
    """How an op that takes a layer's state handle is compiled for the runtime. `given`: the
    arguments of a call, by name.

    handle   the parameter that takes the handle; a call without one keeps nothing
    tokens   (given, tensors are fake) -> how many new tokens the call has, which may be symbolic
    spec     (the layer's name, given, the 8-bit dtype that is asked for or None) -> StateSpec.
             Raises ValueError with the reason for a call that cannot be served
    form     (given, tensors of the state by role, step) -> what the op would return: the call of an
             op that returns the same. It, and what it is computed from, are ops of atomc.ops or
             torch.ops.aten. An op that reads what another has written takes something that the
             writer returned as an operand; one that does both needs no order
    """

    handle: str
    tokens: Callable[[Arguments], int | torch.SymInt]
    spec: Callable[[str, Arguments, torch.dtype | None], StateSpec]
    form: Callable[[Arguments, Mapping[str, Tensor], StepFields], Tensor]
