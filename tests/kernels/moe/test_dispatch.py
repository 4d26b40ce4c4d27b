"""Tokens that are sent to the processes of their experts, over a group of two fake ranks that give
the same.
"""

from typing import Any

import torch
from fake_group import fake_group
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from atomc import ops
from atomc.parallel.collectives import EXPERT_MAP, ExpertsOfRank

NOWHERE = 2  # this process has experts 3 and 0 of four, in this order


def test_choices_of_experts_elsewhere_have_no_weight_and_others_a_row_of_this_process() -> None:
    x = torch.randn(2, 5)
    ids = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.125]])
    places = torch.tensor([[1, NOWHERE, NOWHERE, 0], [0, 1, 1, 0]])
    tokens, rows, kept, _ = ops.dispatch_tokens(x, ids, weights, places, NOWHERE, 2, fake_group(2))
    assert torch.equal(tokens, torch.cat((x, x)))
    assert rows.tolist() == [[1, NOWHERE], [0, NOWHERE]] * 2
    assert kept.tolist() == [[0.75, 0.0], [0.5, 0.0]] * 2


WILD = torch.tensor([[2**31 - 1, 1], [-(2**31), 2]], dtype=torch.int32)


def test_ids_that_no_router_wrote_are_looked_up_without_an_error() -> None:
    # While the kernels of a step are loaded, its ids are what was in memory: reading outside of the
    # map ends a process on a GPU.
    x, weights, group = torch.randn(2, 5), torch.rand(2, 2), fake_group(2)
    places = torch.tensor([[1, NOWHERE, NOWHERE, 0], [0, 1, 1, 0]])
    _, rows, *_ = ops.dispatch_tokens(x, WILD, weights, places, NOWHERE, 2, group)
    assert set(rows.flatten().tolist()) <= {0, 1, NOWHERE}

    module = nn.Module()
    module.register_buffer(EXPERT_MAP, places[0])
    _, rows, _ = ExpertsOfRank(NOWHERE)(module, (x, WILD, weights))
    assert set(rows.flatten().tolist()) <= {0, 1, NOWHERE}


class Gathers(TorchDispatchMode):
    """The gathers and the waits for them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("_c10d_functional::"):
            self.found.append(name.removeprefix("_c10d_functional::"))
        return func(*args, **(kwargs or {}))


def test_on_a_cpu_a_gather_begins_after_the_one_before_it() -> None:
    # Two at once corrupt memory in gloo of torch 2.13, in one of about a thousand pairs.
    x, ids, weights = torch.randn(2, 5), torch.zeros(2, 2, dtype=torch.int32), torch.rand(2, 2)
    places = torch.zeros(2, 4, dtype=torch.int64)
    one_after_another = ["all_gather_into_tensor", "wait_tensor"]
    with Gathers() as of_op:
        ops.dispatch_tokens.reference(x, ids, weights, places, NOWHERE, 2, fake_group(2))
    assert of_op.found == one_after_another * 3
