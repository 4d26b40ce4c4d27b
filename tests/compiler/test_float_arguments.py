"""Python floats as arguments: one graph serves all values unless an op has the float as attribute."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import atomc
from atomc.compiler.pipeline import register_pass
from atomc.graph.variable_float import VariableFloat
from atomc.rewriting.graph_pass import Pass
from atomc.rewriting.rewrite import Fired

EAGER = {"glue": "eager", "strict": True}
VALUES = (0.9, 0.7, 1.0, 2.5, -0.3, 1.0, 3.0)
X = torch.randn(3, 8)
W = torch.rand(8) + 0.5


def num_graphs(function, *calls, options=EAGER, dynamic=None, exact=True):
    """The number of graphs that Dynamo makes for the calls, whose results are compared."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="atom", options=options, dynamic=dynamic)
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    for args in calls:
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(compiled(*args), function(*args), equal_nan=True, **tolerance)
    return counts["unique_graphs"] - before


OPERATIONS = [
    lambda x, t: (x / t).softmax(-1),
    lambda x, t: t / (x.abs() + 1),
    lambda x, t: t - x,
    lambda x, t: x - t,
    lambda x, t: t * x + t,
    lambda x, t: x + (2 * t + 1) ** 2 / 3,
    lambda x, t: x + t * x.shape[0],
    lambda x, t: torch.mul(x, t).add(t),
    lambda x, t: x.clone().mul_(t).sub_(t),
    lambda x, t: operator.iadd(x.clone(), t),
    lambda x, t: x.sum(-1) + t,
]


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_arithmetic_serves_all_values_by_one_graph(operation):
    def function(tensors, t):
        return [operation(x, t) for x in tensors]

    tensors = [
        X.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]
    assert num_graphs(function, *[(tensors, t) for t in VALUES]) == 2
    assert num_graphs(function, (tensors, 0.9), (tensors, 0.7), dynamic=True) == 1


def test_arithmetic_of_integers_serves_all_values_by_one_graph():
    x = torch.arange(8)
    assert num_graphs(lambda x, t: (x * t + t, t - x), *[(x, t) for t in VALUES]) == 2


def test_a_number_in_16_bits_keeps_its_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        calls = [(X.to(dtype), t) for t in VALUES[:3]]
        assert num_graphs(lambda x, t: (x.sum() * t, t - x[0, 0]), *calls, dynamic=True) in (
            1,
            2,
            3,
        )


def test_a_power_serves_all_values_by_one_graph():
    x = X.abs() + 0.1
    calls = [(x, t) for t in VALUES]
    assert num_graphs(lambda x, t: (x**t, t**x), *calls[:2], exact=False, dynamic=True) == 1
    # torch 2.11 guards that the exponent is not 1.0, and then makes the graph for all of them.
    graphs = 3 if torch.__version__.startswith("2.11.") else 2
    assert num_graphs(lambda x, t: x**t, *calls, exact=False) == graphs


def test_inductor_compiles_what_reads_a_float():
    options = {"glue": "inductor", "strict": True}
    calls = [(X, t) for t in VALUES]
    assert num_graphs(OPERATIONS[0], *calls, options=options, exact=False) == 2


def test_floats_of_equal_values_stay_two():
    def function(x, s, t):
        return (x * s).sin() + (x * t).sin() + (x * 0.5).sin()

    calls = [(X, 0.5, 0.5), (X, 0.5, 0.25), (X, 0.25, 0.5), (X, 1.0, 1.0), (X, 3.0, 1.0)]
    assert num_graphs(function, *calls, dynamic=True) == 1


def test_a_float_of_a_module_that_changes_is_an_input():
    class Scaled(nn.Module):
        by = 1.0

        def forward(self, x):
            return F.silu(x * self.by)

    module = Scaled()

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend="atom", options=EAGER, dynamic=dynamic)
        counts = torch._dynamo.utils.counters["stats"]
        before = counts["unique_graphs"]
        for by in VALUES:
            module.by = by
            torch.testing.assert_close(compiled(X), F.silu(X * by))
        assert counts["unique_graphs"] - before == 2


def written_norm(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def test_a_float_that_becomes_an_attribute_is_a_constant():
    assert num_graphs(written_norm, (X, W, 1e-5), (X, W, 1e-2), (X, W, 0.5), (X, W, 1e-5)) == 3
    assert all(report.matches["rms_norm"] == 1 for report in atomc.reports()[-3:])
    assert num_graphs(written_norm, (X, W, 1e-5), (X, W, 1e-2), dynamic=True) == 2
    assert all(report.matches["rms_norm"] == 1 for report in atomc.reports()[-2:])


def test_a_scale_of_attention_is_a_constant_and_a_temperature_beside_it_is_not():
    def function(q, k, v, scale, temperature):
        weights = (q @ k.transpose(-1, -2) * scale).softmax(-1)
        return weights @ v / temperature

    qkv = torch.randn(3, 2, 4, 6, 16)
    calls = [(*qkv, 0.25, t) for t in VALUES] + [(*qkv, 0.5, t) for t in VALUES]
    assert num_graphs(function, *calls, exact=False, dynamic=True) == 2
    assert all(report.matches["attention"] == 1 for report in atomc.reports()[-2:])


def test_a_float_that_another_op_takes_is_a_constant():
    calls = [(X, t) for t in VALUES[:3]]
    assert num_graphs(lambda x, t: x.clamp(max=t) * t, *calls) == 3
    assert num_graphs(lambda x, t: torch.add(x, x, alpha=t), *calls) == 3
    # The name of an argument does not decide: there is no torch._dynamo.reset().
    scaled = torch.compile(lambda x, t: x * t, backend="atom", dynamic=True, options=EAGER)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for args in calls:
        torch.testing.assert_close(scaled(*args), args[0] * args[1])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1


def test_a_pass_of_the_user_that_replaces_a_float_makes_it_a_constant():
    def doubles(gm, context):
        fired = []
        for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)):
            with gm.graph.inserting_before(node):
                by = float(node.args[1])
                made = gm.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 2 * by))
            made.meta.update(node.meta)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
            fired.append(Fired("doubles", made, {}))
        return fired

    with register_pass(Pass("doubles", doubles)):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, t: x * t, backend="atom", dynamic=True, options=EAGER)
        for t in VALUES:
            torch.testing.assert_close(compiled(X, t), X * t * 2)


class Stack(nn.Module):
    """Layers that `outline` traces once, all of which read the float."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x, scale):
        for layer in self.layers:
            x = layer(x, scale)
        return x * scale


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, scale):
        return x + self.down(F.silu(self.up(self.norm(x)) * scale)) / (1 + scale)


def test_layers_that_are_traced_once_read_a_float():
    model = Stack().eval().requires_grad_(False)
    assert num_graphs(model, *[(X, t) for t in VALUES], exact=False) == 2
    assert atomc.reports()[-1].matches["rms_norm"] == 4
    assert "1 layer traced, 4 inlined" in atomc.reports()[-1].notes


def test_a_start_with_another_value_finds_the_graph_in_the_cache(tmp_path):
    def function(x, t):
        return F.silu(x * t) / t

    options = {**EAGER, "cache_dir": str(tmp_path), "cache": True}
    for t, outcome in ((0.5, "miss"), (0.25, "hit")):
        assert num_graphs(function, (X, t), options=options, dynamic=True) == 1
        assert atomc.reports()[-1].cache.startswith(outcome)


def test_a_variable_float_equals_only_itself():
    half = VariableFloat(0.5, "t")
    assert half != 0.5 and half == VariableFloat(0.5, "t") and half != VariableFloat(0.5, "s")
    assert half * 2 == 1.0 and repr(half) == "0.5" and len({half, 0.5}) == 2
