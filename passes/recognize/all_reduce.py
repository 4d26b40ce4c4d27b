"""Replace a sum over a process group and the wait for it by one op.

x > all_reduce(sum) > wait_tensor    =>    all_reduce(x)
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, tensor_example
from atomc.rewriting.rewrite import Rewrite

functional = torch.ops._c10d_functional


def _pattern(x: Tensor, group: str) -> Tensor:
    summed: Tensor = functional.wait_tensor(functional.all_reduce(x, "sum", group))
    return summed


def _example() -> Example:
    return {"x": tensor_example(3, 10), "group": "a group"}


ALL_REDUCE = Rewrite("all_reduce", _pattern, lambda x, group: ops.all_reduce(x, group), _example)
