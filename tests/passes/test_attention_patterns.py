"""Inductor's own patterns of attention, some of which are wrong in some versions of torch."""

import pytest
import torch
from torch.testing import assert_close

import atomc
from atomc.torch_compat import inductor

QKV = [torch.randn(2, 4, 8, 8) for _ in range(3)]
INDUCTOR = {"glue": "inductor"}


def over_queries(q, k, v):
    return ((q @ k.transpose(-1, -2)) * 0.25).softmax(-2) @ v


def over_heads(q, k, v):
    return ((q @ k.transpose(-1, -2)) / 4.0).softmax(1) @ v


def permuted_keys(q, k, v):
    return (q.double() @ k.double().permute(0, 1, 3, 2)).div(4.0).softmax(-1) @ v.double()


def over_keys(q, k, v):
    return ((q @ k.transpose(-1, -2)) * 0.25).softmax(-1) @ v


def written_out(q, k, v):
    scores = q @ k.transpose(-1, -2) * 0.25
    weights = (scores - scores.amax(-2, keepdim=True)).exp()
    return (weights / weights.sum(-2, keepdim=True)) @ v


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize(
    "function", [over_queries, over_heads, permuted_keys, written_out, over_keys]
)
def test_what_inductor_compiles_for_us_is_right(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="atom", options=INDUCTOR)
    assert_close(compiled(*QKV), function(*QKV))


def test_a_training_graph_is_right_and_the_report_says_what_is_off():
    torch._dynamo.reset()
    q = QKV[0].clone().requires_grad_()
    compiled = torch.compile(over_queries, backend="atom", options=INDUCTOR)
    out, expected = compiled(q, *QKV[1:]), over_queries(q, *QKV[1:])
    assert_close(out, expected)
    assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q))
    off = any("attention patterns are off" in note for note in atomc.reports()[-1].notes)
    assert off == inductor.attention_patterns_are_wrong()


def test_the_patterns_of_other_programs_stay():
    from torch._inductor.fx_passes import joint_graph

    before = list(joint_graph.pass_patterns)
    graph = torch.fx.symbolic_trace(over_queries)
    with pytest.raises(RuntimeError, match="stop"), inductor._right_patterns(graph):
        raise RuntimeError("stop")
    assert joint_graph.pass_patterns == before
    assert torch._inductor.config.joint_custom_pre_pass is None


def test_the_probe_finds_the_wrong_replacement():
    """Without the probe's context, Inductor computes another function where the probe says so."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        actual = torch.compile(over_queries, backend="inductor")(*QKV)
    wrong = not torch.allclose(actual, over_queries(*QKV), atol=1e-4)
    assert wrong == inductor.attention_patterns_are_wrong()
