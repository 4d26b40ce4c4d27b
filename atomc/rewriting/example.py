"""Example arguments of a pattern, which specify its sizes, dtypes and captured attributes."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from atomc.graph.canonical import Attr

T = TypeVar("T")


class OneOf(Generic[T]):
    """One of these values, captured at each site. The same object in several places of an example
    takes the same value.

    The pattern is traced with the first two values; a single value is a constant. For the dtype of
    a tensor, see `tensor_example`.

    follows  if the values are tensors, the choice of their dtypes
    """

    def __init__(self, *values: T, follows: "OneOf[torch.dtype] | None" = None):
        self.values, self.follows = values, follows

    def __contains__(self, item: object) -> bool:
        return item in self.values


# A fixed value of an example: a tensor, an attribute of an op, None for an absent operand, or a
# function that the pattern calls.
Fixed = (
    Tensor
    | torch.dtype
    | str
    | int
    | float
    | tuple[Attr, ...]
    | None
    | Callable[..., Tensor | tuple[Tensor, ...]]
)
ExampleValue = Fixed | OneOf[Tensor] | OneOf[torch.dtype] | OneOf[str] | OneOf[bool] | OneOf[int]
Example = dict[str, ExampleValue]


def tensor_example(
    *shape: int, dtype: torch.dtype | OneOf[torch.dtype] = torch.bfloat16, device: str = "meta"
) -> Tensor | OneOf[Tensor]:
    """A tensor of which only the sizes and the dtype count. device: "cpu" for a pattern that is
    another one on CPUs.

    With a `OneOf` as dtype, the site may have any of these dtypes. If the same `OneOf` is also an
    argument of the example, that argument is captured and equals the dtype.
    """
    if isinstance(dtype, OneOf):
        return OneOf(
            *(torch.empty(*shape, dtype=each, device=device) for each in dtype.values),
            follows=dtype,
        )
    return torch.empty(*shape, dtype=dtype, device=device)


def norm_example(*rows: str, width: int = 10) -> Example:
    """The arguments of an RMSNorm of x, and of an op that also reads these rows. The weight is in
    the model's dtype or in fp32.
    """
    return {
        **{name: tensor_example(3, width) for name in ("x", *rows)},
        "weight": tensor_example(width, dtype=OneOf(torch.bfloat16, torch.float32)),
        "eps": 1e-6,
        "style": "after",
    }
