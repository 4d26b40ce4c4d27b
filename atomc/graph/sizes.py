"""Comparison of sizes without adding guards, also for kernels. Symbolic sizes:
atomc.graph.expressions.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # loading sympy is slow, and kernels do not need it where sizes are numbers
    import sympy


def known_equal(a: "int | torch.SymInt | sympy.Expr", b: "int | torch.SymInt | sympy.Expr") -> bool:
    """True only if a == b for every value of their symbols. (`a == b` and guard_or_false would add
    a guard.)
    """
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from atomc.graph.expressions import always_equal  # sympy is loaded where there are symbols

    return always_equal(a, b)


def first_size(size: int | torch.SymInt) -> int:
    """A size in the first call; 1 if it depends on data."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else 1


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True only if the two shapes are equal for every value of their symbols."""
    return same_sizes(a.shape, b.shape)


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """True only if the numbers of sizes and all sizes are equal, as in known_equal."""
    return len(a) == len(b) and all(map(known_equal, a, b))


def spell_shape(shape: Sequence[object]) -> str:
    """[2, s0, 8]"""
    return "[" + ", ".join(str(size) for size in shape) + "]"
