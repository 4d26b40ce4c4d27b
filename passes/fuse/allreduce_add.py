"""Sum over a process group once: what is added behind two sums is added before one.

x > all_reduce -+                 x -+
                add -> y    =>       add > all_reduce -> y
z > all_reduce -+                 z -+

A mixture of experts has a sum behind its experts and one behind its shared expert, which may have
a gate, a number per token:

x > all_reduce ----------------+                 x ----------+
z > all_reduce -+              add -> y    =>    z -+        add > all_reduce -> y
gate -----------+- mul --------+                 gate -+- mul -+

The gate must be the same on all processes, as the residual of allreduce_add_rms_norm must be: then
each process multiplies its part of the sum. A graph does not show which parameters are divided. A
factor per column, which may be a part of a whole one, is left alone.

Not exact: each process rounds its gated product and its part of the total to x.dtype, where the
product and the total of whole sums were rounded.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite

aten = torch.ops.aten


def _total(first: Tensor, second: Tensor, gate: Tensor | None) -> Tensor:
    if gate is not None:
        second = aten.mul.Tensor(second, gate)
    total: Tensor = aten.add.Tensor(first, second)
    return total


def _pattern(x: Tensor, other: Tensor, group: str, gate: Tensor | None) -> Tensor:
    return _total(ops.all_reduce(x, group), ops.all_reduce(other, group), gate)


def _replacement(x: Tensor, other: Tensor, group: str, gate: Tensor | None) -> Tensor:
    return ops.all_reduce(_total(x, other, gate), group)


def _example(gated: bool) -> Example:
    return {
        "x": tensor_example(3, 10),
        "other": tensor_example(3, 10),
        "group": "a group",
        "gate": tensor_example(3, 1) if gated else None,
    }


ALLREDUCE_ADD = Rewrite(
    "allreduce_add",
    _pattern,
    _replacement,
    _example,
    needs={"all_reduce": {}},
    nests=True,
    cases=[Case("", {"gated": False}), Case("gated", {"gated": True})],
)
