"""Replace the calls of torch.distributed and the waits for them by one op.

x > all_reduce(sum) > wait_tensor    =>    all_reduce(x)

x > all_gather_into_tensor > wait_tensor -+- [:rows] -------+- cat(-1)    =>    all_gather(x)
                                          +- [rows:2*rows] -+
                                          +- ...

Processes are gathered along the first dimension: `cat` moves them to the last one. The parts are
slices, or x.view(ranks, ...).unbind(0); with one row, a view joins them.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.canonical import call
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.matching.pattern import Index
from atomc.rewriting.rewrite import Case, Rewrite

functional = torch.ops._c10d_functional
_GATHER = "_c10d_functional::all_gather_into_tensor"


def _all_reduce(x: Tensor, group: str) -> Tensor:
    summed: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", group))
    return summed


def _all_reduce_example() -> Example:
    return {"x": tensor_example(3, 10), "group": "a group"}


def _all_gather(x: Tensor, group: str, ranks: int, parts: str) -> Tensor:
    gathered: Tensor = functional.wait_tensor(functional.all_gather_into_tensor(x, ranks, group))
    if ranks == 1:
        return gathered
    if parts == "one row":
        return gathered.view(*x.shape[:-1], ranks * x.shape[-1])
    if parts == "slices":
        return torch.cat(gathered.chunk(ranks), -1)
    return torch.cat(gathered.view(ranks, *x.shape).unbind(0), -1)


def _all_gather_example(ranks: int, dims: int, parts: str) -> Example:
    shape = (*((1,) * (dims - 1) if parts == "one row" else (3, 5)[: dims - 1]), 10)
    return {
        "x": tensor_example(*shape),
        "group": "a group",
        "ranks": OneOf(ranks),  # of this case
        "parts": OneOf(parts),
    }


def _cases(index: Index) -> Sequence[Case]:
    sizes = {call(node).attrs["group_size"]: None for node in index[_GATHER]}
    return [case for ranks in sizes if isinstance(ranks, int) for case in _cases_of(ranks)]


@functools.cache
def _cases_of(ranks: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{ranks} processes, {parts} [{'B, ' * (dims == 3)}T, D]",
            {"ranks": ranks, "dims": dims, "parts": parts},
        )
        for dims in (2, 3)
        for parts in (("slices", "unbind", "one row") if ranks > 1 else ("whole",))
    )


ALL_REDUCE = Rewrite(
    "all_reduce",
    _all_reduce,
    lambda x, group: ops.all_reduce(x, group),
    _all_reduce_example,
)
ALL_GATHER = Rewrite(
    "all_gather",
    _all_gather,
    lambda x, group, ranks, parts: ops.all_gather(x, ranks, group),
    _all_gather_example,
    needs={_GATHER: {}},
    cases=(),
    cases_in=_cases,
)
