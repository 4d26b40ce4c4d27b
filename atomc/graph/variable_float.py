"""A float argument of the compiled function, as passes see it."""

from typing import NamedTuple

from torch.fx import Node


class FloatInput(NamedTuple):
    """A float input: its placeholder in Dynamo's graph, and its value in the first call."""

    placeholder: Node
    value: float


class VariableFloat(float):
    """The value that an input of this name has in the first call; equal to nothing but itself.

    A pass that takes it as an attribute of an op makes the input a constant.
    """

    name: str

    def __new__(cls, value: float, name: str) -> "VariableFloat":
        number = super().__new__(cls, value)
        number.name = name
        return number

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]
        return float(self), self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableFloat) and other.name == self.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.name)
