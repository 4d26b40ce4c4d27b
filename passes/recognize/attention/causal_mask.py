"""Which keys a mask hides, where the graph builds the mask from positions alone.

where(arange(S) <= arange(T)[:, None], 0, -inf)    =>    keys j with j - i <= 0 are visible

Without a cache, transformers numbers the sequences that are packed in a row: a new one begins where
positions do not go up by one. Positions that the graph counts itself are one sequence.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.fx import Node

from atomc.graph.canonical import Call, call, dims_of, spell, value
from atomc.graph.sizes import known_equal, same_sizes
from atomc.rewriting.matching.pattern import Unlike

# What holds the index of every key; bfloat16 and float16 round from 257 and 2049 on.
_INDICES = (torch.int32, torch.int64, torch.float32, torch.float64)


class Position(NamedTuple):
    """The index in one dimension (from the end), plus a number. rounded: the node that may have
    rounded it.
    """

    dim: int
    offset: int
    rounded: Node | None = None


class Band(NamedTuple):
    """The pairs of query i and key j with low <= j - i <= high."""

    low: float = -math.inf
    high: float = math.inf

    def __and__(self, other: "Band") -> "Band":
        return Band(max(self.low, other.low), min(self.high, other.high))

    def complement(self) -> "Band | None":
        """The other pairs, if they are one band."""
        if self.low == -math.inf and self.high < math.inf:
            return Band(self.high + 1, math.inf)
        if self.high == math.inf and self.low > -math.inf:
            return Band(-math.inf, self.low - 1)
        return None


class Outside(NamedTuple):
    """Zero (False) in the band, `fill` (True) outside."""

    band: Band
    fill: float


# What is known of a tensor: one number everywhere, positions, pairs that are True, or a float mask.
Known = float | Position | Band | Outside | None


def visible(mask: Node, scores: Node, limit: float, true_hides: bool = True) -> Band | None:
    """The keys of scores [.., T, S] that a mask leaves visible, for every value of the graph's
    inputs; None if that is not known. A bool mask is True for hidden keys if `true_hides`, else for
    visible ones; a float mask hides with values up to `limit`. Raises Unlike for positions that may
    be rounded.
    """
    truth = _broadcast(mask, scores)
    if value(mask).dtype == torch.bool and not true_hides:
        return truth if isinstance(truth, Band) else None
    if truth == 0.0:
        return Band()
    if value(mask).dtype == torch.bool:
        truth = _negated(truth)
        return truth if isinstance(truth, Band) else None
    return truth.band if isinstance(truth, Outside) and truth.fill <= limit else None


def constant(node: Node) -> float | None:
    """The number that a tensor consists of, or None."""
    here = call(node)
    if here.op in ("zeros", "zeros_like", "new_zeros"):
        return 0.0
    if here.op in ("ones", "ones_like", "new_ones"):
        return 1.0
    name = {"full": "fill_value", "full_like": "fill_value", "new_full": "fill_value"}
    number = here.attrs.get(name.get(here.op, "s" if here.op == "scalar_tensor" else ""))
    if isinstance(number, bool | int | float):
        return float(number)
    if here.op in ("lift_fresh_copy", "view", "expand", "clone", "cast"):
        return constant(here.operands[0])
    if node.op == "get_attr" and value(node).numel() == 1:
        return float(getattr(node.graph.owning_module, str(node.target)).item())
    return None


def _known(node: Node) -> Known:
    here = call(node)
    if (number := constant(node)) is not None:
        return Band() if number and value(node).dtype == torch.bool else number
    rule = _RULES.get(here.op)
    return rule(node, here) if rule else None


def _broadcast(operand: Node, node: Node) -> Known:
    """What is known of an operand in the shape of a node: nothing if a dimension on which it
    depends is expanded.
    """
    truth = _known(operand)
    if truth is None or isinstance(truth, float) or truth == Band():
        return truth
    old, new = value(operand).shape, value(node).shape
    dims = (truth.dim,) if isinstance(truth, Position) else (-2, -1)
    keeps_dims = len(old) >= len(dims) and all(known_equal(old[d], new[d]) for d in dims)
    return truth if keeps_dims else None


def _arange(node: Node, here: Call) -> Known:
    start, step = here.attrs.get("start", 0), here.attrs.get("step", 1)
    return _stored(Position(-1, start), node) if isinstance(start, int) and step == 1 else None


def _stored(position: Position, node: Node) -> Position:
    """A position in the dtype of a node."""
    return position if value(node).dtype in _INDICES else position._replace(rounded=node)


def _moved(node: Node, here: Call) -> Known:
    """Views that only add or remove dimensions of size 1."""
    source = here.operands[0]
    truth, before, after = _known(source), _wide(source), _wide(node)
    old, new = value(source).shape, value(node).shape
    if not same_sizes([old[d] for d in before], [new[d] for d in after]):
        return None
    if isinstance(truth, Position):
        return truth._replace(dim=after[before.index(truth.dim)]) if truth.dim in before else None
    return truth if before[-2:] == after[-2:] else None


def _cast(node: Node, here: Call) -> Known:
    """A float mask as bool is True where it hides."""
    truth, to_bool = _known(here.operands[0]), value(node).dtype == torch.bool
    if isinstance(truth, Position):
        return None if to_bool else _stored(truth, node)
    if isinstance(truth, Outside) and value(here.operands[0]).dtype != torch.bool:
        return truth
    return truth if to_bool else None


def _wide(node: Node) -> list[int]:
    """The dimensions, from the end, whose size is not 1."""
    shape = value(node).shape
    return [d - len(shape) for d, size in enumerate(shape) if not known_equal(size, 1)]


def _permuted(node: Node, here: Call) -> Known:
    truth, dims = _known(here.operands[0]), dims_of(here.attrs["dims"])
    if not isinstance(truth, Position) or -truth.dim > len(dims):
        return truth if isinstance(truth, Position) else None
    return truth._replace(dim=dims.index(truth.dim) - len(dims))


def _shifted(node: Node, here: Call) -> Known:
    """positions + number, positions - number, positions - positions."""
    if here.attrs.get("alpha", 1) != 1:
        return None
    truth, *others = (_broadcast(operand, node) for operand in here.operands)
    number, sign = here.attrs.get("other"), 1 if here.op == "add" else -1
    if others:
        return _distance(truth, others[0]) if here.op == "sub" else None
    if not isinstance(number, int):
        return None
    if isinstance(truth, Position):
        return truth._replace(offset=truth.offset + sign * number)
    if isinstance(truth, float) and not value(node).is_floating_point():
        return truth + sign * number
    return None


def _distance(a: Known, b: Known) -> Known:
    if not isinstance(a, Position) or not isinstance(b, Position) or a.dim != b.dim:
        return None
    return None if a.rounded or b.rounded else float(a.offset - b.offset)


def _sliced(node: Node, here: Call) -> Known:
    truth, dim, start = _known(here.operands[0]), here.attrs["dim"], here.attrs["start"]
    if isinstance(truth, float):
        return truth
    if not isinstance(truth, Position) or truth.dim != dim:
        return truth if isinstance(truth, Position) else None
    if not isinstance(start, int) or start < 0 or here.attrs["step"] != 1:
        return None
    offset = truth.offset + start
    one = known_equal(value(node).shape[truth.dim], 1) and truth.rounded is None
    return float(offset) if one else truth._replace(offset=offset)


def _joined(node: Node, here: Call) -> Known:
    """The number before the first position, then the positions."""
    if len(here.operands) != 2:
        return None
    before, truth = map(_known, here.operands)
    if not isinstance(truth, Position) or truth.dim != here.attrs.get("dim", 0):
        return None
    one = known_equal(value(here.operands[0]).shape[truth.dim], 1)
    return truth._replace(offset=truth.offset - 1) if one and before == truth.offset - 1 else None


def _picked(node: Node, here: Call) -> Known:
    """numbers[positions, ...]: an index of each dimension."""
    x, *indices = here.operands
    truth = _known(x)
    if isinstance(truth, float):
        return truth
    if not isinstance(truth, Position) or len(indices) != value(x).dim():
        return None
    index = _broadcast(indices[truth.dim], node)
    if not isinstance(index, Position) or index.rounded or index.offset < 0:
        return None
    return truth._replace(dim=index.dim, offset=truth.offset + index.offset)


def _equal(node: Node, here: Call) -> Known:
    """Comparisons of two numbers."""
    operands: list[Known] = [_broadcast(operand, node) for operand in here.operands]
    number = here.attrs.get("other")
    operands += [float(number)] if isinstance(number, int | float) else []
    if len(operands) != 2 or not all(isinstance(each, float) for each in operands):
        return None
    return Band() if (operands[0] == operands[1]) == (here.op == "eq") else 0.0


def _compared(node: Node, here: Call) -> Known:
    if len(here.operands) != 2:
        return _always(node, here)
    a, b = (_broadcast(operand, node) for operand in here.operands)
    if not isinstance(a, Position) or not isinstance(b, Position):
        return None
    if {a.dim, b.dim} != {-1, -2}:
        return None
    if rounded := a.rounded or b.rounded:
        raise Unlike("dtype", "positions in int64, int32 or float32", spell(rounded), rounded)
    op = here.op
    if a.dim == -2:  # row op column: the same as column op' row
        a, b, op = b, a, {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}[op]
    shift = b.offset - a.offset  # column op row + shift
    return {
        "le": Band(high=shift),
        "lt": Band(high=shift - 1),
        "ge": Band(low=shift),
        "gt": Band(low=shift + 1),
    }[op]


def _always(node: Node, here: Call) -> Known:
    """Comparisons with a number that are True for every position."""
    [operand], number = here.operands, here.attrs.get("other")
    truth = _known(operand)
    if not isinstance(truth, Position) or truth.rounded or not isinstance(number, int | float):
        return None
    size, first = value(operand).shape[truth.dim], truth.offset
    last = first + size - 1 if isinstance(size, int) else math.inf
    always = {
        "ge": first >= number,
        "gt": first > number,
        "le": last <= number,
        "lt": last < number,
    }
    return Band() if always[here.op] else None


def _both(node: Node, here: Call) -> Known:
    a, b = (_broadcast(operand, node) for operand in here.operands)
    return a & b if isinstance(a, Band) and isinstance(b, Band) else None


def _negated(truth: Known) -> Known:
    if isinstance(truth, Outside):
        return truth.band
    return truth.complement() or Outside(truth, 1.0) if isinstance(truth, Band) else None


def _triangle(node: Node, here: Call) -> Known:
    """tril and triu of one number."""
    truth, diagonal = _known(here.operands[0]), here.attrs.get("diagonal", 0)
    if not isinstance(diagonal, int):
        return None
    band = Band(high=diagonal) if here.op == "tril" else Band(low=diagonal)
    if isinstance(truth, Band):
        return truth & band
    outside = band.complement()
    return Outside(outside, truth) if isinstance(truth, float) and truth and outside else None


def _where(node: Node, here: Call) -> Known:
    if len(here.operands) != 3:
        return None
    condition, then, other = (_broadcast(operand, node) for operand in here.operands)
    return _chosen(condition, then, other)


def _filled(node: Node, here: Call) -> Known:
    """masked_fill(number, condition, fill)"""
    base, condition = (_broadcast(operand, node) for operand in here.operands[:2])
    fill = here.attrs.get("value")
    if len(here.operands) == 3:
        fill = constant(here.operands[2])
    return _chosen(condition, float(fill), base) if isinstance(fill, int | float) else None


def _chosen(condition: Known, then: Known, other: Known) -> Known:
    """The mask with `then` where the condition holds; one of both is zero."""
    if not isinstance(condition, Band) or other == 0.0:
        condition, then, other = _negated(condition), other, then
    if isinstance(condition, Band) and then == 0.0 and isinstance(other, float):
        return Outside(condition, other)
    return None


_RULES: dict[str, Callable[[Node, Call], Known]] = {
    "arange": _arange,
    "view": _moved,
    **dict.fromkeys(("expand", "clone"), lambda node, here: _broadcast(here.operands[0], node)),
    "cast": _cast,
    "permute": _permuted,
    "add": _shifted,
    "sub": _shifted,
    **dict.fromkeys(("le", "lt", "ge", "gt"), _compared),
    **dict.fromkeys(("bitwise_and", "logical_and"), _both),
    **dict.fromkeys(
        ("bitwise_not", "logical_not"), lambda node, here: _negated(_known(here.operands[0]))
    ),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "slice": _sliced,
    "cat": _joined,
    "index": _picked,
    **dict.fromkeys(("eq", "ne"), _equal),
    "cumsum": lambda node, here: 0.0 if _known(here.operands[0]) == 0.0 else None,
    "where": _where,
    "masked_fill": _filled,
}
