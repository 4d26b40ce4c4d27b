"""What the compiler must know of an op beyond its reference, declared with `@op(...)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any


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
    scales  (arguments by name, tensors are fake) -> what shares a scale, for reports: "a scale an output"
    codes   how many codes one element of the stored weight holds
    rate    products per second, relative to the peak of bf16
    stored  the parameters that hold it: first the codes, then what gives them back; one may be None in a call
    """

    format: str
    scales: Callable[[Mapping[str, Any]], str]
    codes: int
    rate: int
    stored: tuple[str, ...] = ("weight", "weight_scale")
