"""`Report.why` answers for ops that calls of PyTorch become, as it does for rewrites."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import explained

from atomc.passes.lift import LIFTED

X, W = torch.randn(2, 3, 5, 8), torch.randn(8, 8)


@pytest.mark.parametrize("op", LIFTED)
def test_a_lifted_op_that_the_graph_lacks_has_no_anchor(op):
    assert explained(torch.sin, X).why(op).startswith(f"{op}: no anchor")


def test_a_lifted_op_says_where_it_fired():
    assert "fired at 1 site" in explained(F.linear, X, W).why("linear")


def test_a_call_that_is_not_lifted_says_why():
    def attended(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=1e-9)

    why = explained(attended, X, tolerance=1e-6).why("attention")
    assert "expected a call that attention computes; found it has dropout" in why
