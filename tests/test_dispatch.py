"""Tokens that are sent to the processes of their experts, over a group of two fake ranks that give
the same.
"""

import torch
from fake_group import fake_group

from atomc import ops

NOWHERE = 2  # this process has experts 3 and 0 of four, in this order


def test_choices_of_experts_elsewhere_have_no_weight_and_others_a_row_of_this_process() -> None:
    x = torch.randn(2, 5)
    ids = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.125]])
    places = torch.tensor([[1, NOWHERE, NOWHERE, 0], [0, 1, 1, 0]])
    tokens, rows, kept = ops.dispatch_tokens(x, ids, weights, places, NOWHERE, 2, fake_group(2))
    assert torch.equal(tokens, torch.cat((x, x)))
    assert rows.tolist() == [[1, NOWHERE], [0, NOWHERE]] * 2
    assert kept.tolist() == [[0.75, 0.0], [0.5, 0.0]] * 2
