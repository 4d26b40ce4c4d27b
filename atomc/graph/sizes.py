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


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True only if the two shapes are equal for every value of their symbols."""
    return same_sizes(a.shape, b.shape)


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """True only if the numbers of sizes and all sizes are equal, as in known_equal."""
    return len(a) == len(b) and all(map(known_equal, a, b))


def spell_shape(shape: Sequence[object]) -> str:
    """[2, s0, 8]"""
    return "[" + ", ".join(str(size) for size in shape) + "]"
