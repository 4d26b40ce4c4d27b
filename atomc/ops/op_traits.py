"""Properties of ops that the compiler uses besides the reference, declared with `@op(...)`."""

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
    """What an op computes. A fused op has the union of its parts: `Kind.NORM | Kind.QUANTIZE`."""

    LINEAR = auto()  # a product of rows with a stored weight
    ADAPTER = auto()  # changes the result of a linear layer, which is its first parameter
    BMM = auto()  # a product per head
    ATTENTION = auto()
    NORM = auto()
    GATE = auto()  # a gated activation; its first two parameters are the gate and the gated tensor
    ROPE = auto()
    QUANTIZE = auto()
    LOOKUP = auto()  # rows of a table; its first two parameters are the indices and the table
    STATE_WRITE = auto()
    COLLECTIVE = auto()  # all processes of a group take part
    ROUTE = auto()  # chooses experts
    EXPERTS = auto()  # products of rows with the weights of their experts
    WEIGHT = auto()  # another form of a weight, which kernels prepare once
    OTHER = auto()


@dataclass(frozen=True)
class QuantizedWeight:
    """How the weight of a linear is stored.

    format  the name in reports: "fp8", "int4"
    scales  (arguments by name, tensors are fake) -> the granularity of the scales, for reports:
            "one scale per output"
    codes   the number of codes in one element of the stored weight
    rate    products per second, relative to the peak of bf16: the same in all calls, or
            (arguments by name) -> that of a call
    stored  the parameters that contain it: first the codes, then scales and zero points; one may be
            None in a call
    weights how many of `stored` are codes: 1, or 2 for experts
    """

    format: str
    scales: Callable[[Arguments], str]
    codes: int
    rate: int | Callable[[Arguments], int]
    stored: tuple[str, ...] = ("weight", "weight_scale")
    weights: int = 1


class StepFields(Protocol):
    """Tensors of a step: the fields of atomc.ops.Step, and of GroupStep for the layer's group."""

    query_start: Tensor
    seq_lens: Tensor
    state_slots: Tensor
    slots: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class StateBinding:
    """How an op that takes a layer's state handle is compiled for the runtime. `arguments`: of a
    call, by name.

    handle   the parameter that takes the handle; a call without a handle has no state
    tokens   (arguments, tensors are fake) -> the number of new tokens, which may be symbolic
    spec     (name of the layer, arguments, the requested 8-bit dtype or None) -> StateSpec. Raises
             ValueError with the reason for a call that the runtime does not support
    form     (arguments, tensors of the state by role, step) -> the result of the op, computed with
             ops of atomc.ops and torch.ops.aten that read and write these tensors. An op that reads
             what another op has written takes a result of the writer as an operand, which keeps
             their order
    kept     the parameters whose rows the state keeps, for an op with `reads`
    reads    (arguments, tensors of the state by role, step, the result of the op that writes) -> as
             form, of a call whose rows an earlier call writes: it has the same nodes for `kept`,
             and an equal spec
    """

    handle: str
    tokens: Callable[[Arguments], int | torch.SymInt]
    spec: Callable[[str, Arguments, torch.dtype | None], StateSpec]
    form: Callable[[Arguments, Mapping[str, Tensor], StepFields], Tensor]
    kept: tuple[str, ...] = ()
    reads: Callable[[Arguments, Mapping[str, Tensor], StepFields, Tensor], Tensor] | None = None
