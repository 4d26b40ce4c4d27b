"""A sum over a process group that is waited for at once is one op.

x > all_reduce(sum) > wait_tensor    =>    all_reduce(x)
"""

from typing import Any

import torch
from torch import Tensor

from atomc import ops
from atomc.rewriting.rewrite import Rewrite, tensor_example


def _pattern(x: Tensor, group: str) -> Any:
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce(x, "sum", group)
    )


def _example() -> dict[str, Any]:
    return {"x": tensor_example(3, 10), "group": "a group"}


ALL_REDUCE = Rewrite("all_reduce", _pattern, lambda x, group: ops.all_reduce(x, group), _example)
