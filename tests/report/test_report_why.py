"""`Report.why` answers for ops that calls of PyTorch become, as it does for rewrites, and for their
quantized forms.
"""

import pytest
import torch
import torch.nn.functional as F
from rewriting import explained
from tiny_experts import random_model

import atomc
from atomc.loading.loader import ready
from atomc.passes.lift import LIFTED
from atomc.program import compile_model

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


@pytest.mark.rotating
def test_why_names_the_quantized_form_of_a_linear_and_of_experts():
    model = random_model("qwen3_moe")
    report = compile_model(ready(atomc.quantize(model, "int8")), {"glue": "eager"}).report
    dense = "layers.1.self_attn"
    assert report.why("moe_experts").startswith(
        "moe_experts: the weights are quantized: moe_experts_int8 at 2 sites in layers 0-1; runs as"
    )
    assert report.why("linear", dense).startswith(
        f"linear below {dense}: the weights are quantized: scaled_linear_int8 at 2 sites in "
        "layers 1; runs as"
    )
    assert "fired at" in report.why("linear")  # the router and the head


def test_why_of_experts_of_a_model_without_experts_has_no_anchor():
    assert explained(F.linear, X, W).why("moe_experts").startswith("moe_experts: no anchor")
