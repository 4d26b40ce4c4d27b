"""One spelling per idea: what differs only in how it is written has the same canonical call."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import functional_graph
from torch.fx import Graph, Node

from atomc.graph.canonical import Call, call, keeps_last_dim, spell, value

X = torch.randn(2, 6, 8)


def nodes(function, *inputs, dynamic=False) -> list[Node]:
    """The nodes of the functional graph, without the parts of a tuple that only stand between."""
    graph: Graph = functional_graph(function, *inputs, dynamic=dynamic)
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and isinstance(value(node), torch.Tensor)
    ]


def calls(function, *inputs, dynamic=False) -> list[tuple[str, dict[str, object]]]:
    return [
        (made.op, {name: attr for name, attr in made.attrs.items() if name != "given"})
        for made in map(call, nodes(function, *inputs, dynamic=dynamic))
    ]


SAME = {
    "square": [lambda x: x * x, lambda x: x.pow(2), lambda x: torch.square(x), lambda x: x**2],
    "dims count from the end": [lambda x: x.mean(-1, keepdim=True), lambda x: x.mean(2, keepdim=True),
                                lambda x: torch.mean(x, dim=[-1], keepdim=True)],
    "several dims in any order": [lambda x: x.sum((0, 2)), lambda x: x.sum((-1, -3))],
    "halves": [lambda x: sum_of(x.chunk(2, -1)), lambda x: sum_of(x.split(4, 2)), lambda x: sum_of(x.split([4, 4], -1)),
               lambda x: x[..., :4] + x[..., 4:], lambda x: x[:, :, 0:4] + x[:, :, -4:8]],
    "swapped dims": [lambda x: x.transpose(1, 2).exp(), lambda x: x.permute(0, 2, 1).exp(), lambda x: x.mT.exp()],
    "views": [lambda x: x.view(2, 2, 3, 8).exp(), lambda x: x.reshape(2, 2, -1, 8).exp(),
              lambda x: x.unflatten(1, (2, 3)).exp()],
    "a new dim": [lambda x: x.unsqueeze(1).exp(), lambda x: x[:, None].exp(), lambda x: x.view(2, 1, 6, 8).exp()],
    "casts": [lambda x: x.bfloat16().exp(), lambda x: x.to(torch.bfloat16).exp(), lambda x: x.type(torch.bfloat16).exp()],
    "defaults": [lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="none")],
    "a power": [lambda x: x.pow(3), lambda x: torch.pow(x, 3)],
}  # fmt: skip
DIFFERENT = {
    "another dim": [lambda x: x.mean(-1, keepdim=True), lambda x: x.mean(1, keepdim=True)],
    "without keepdim": [lambda x: x.mean(-1, keepdim=True), lambda x: x.mean(-1)],
    "unequal halves": [lambda x: x[..., :4].exp(), lambda x: x[..., :3].exp()],
    "another step": [lambda x: x[..., ::2].exp(), lambda x: x[..., :4].exp()],
    "another device": [
        lambda x: x.to(torch.bfloat16).exp(),
        lambda x: x.to("meta", torch.bfloat16).exp(),
    ],
    "another dtype": [lambda x: x.bfloat16().exp(), lambda x: x.half().exp()],
    "a scaled sum": [lambda x: torch.add(x, x.exp()), lambda x: torch.add(x, x.exp(), alpha=2)],
    "another approximation": [lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")],
    "another reading of the bytes": [
        lambda x: x.view(torch.int32).abs(),
        lambda x: x.view(2, 6, 8).abs(),
    ],
    "another shape": [lambda x: x.view(2, 2, 3, 8).exp(), lambda x: x.view(2, 3, 2, 8).exp()],
}


def sum_of(parts):
    return parts[0] + parts[1]


@pytest.mark.parametrize("name", SAME)
def test_the_same_idea_has_the_same_call(name):
    first, *others = SAME[name]
    for other in others:
        assert calls(other, X) == calls(first, X)


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_idea_has_another_call(name):
    first, *others = DIFFERENT[name]
    for other in others:
        assert calls(other, X) != calls(first, X)


def test_a_permutation_is_the_same_at_any_rank():
    rank_four = torch.randn(3, 2, 6, 8)
    assert calls(lambda x: x.transpose(-1, -2).exp(), X) == calls(
        lambda x: x.transpose(2, 3).exp(), rank_four
    )


def test_tensors_are_operands_and_lists_of_them_are_flattened():
    *_, cat = nodes(lambda x, y: torch.cat((x.exp(), y, x.exp()), 1), X, X + 1)
    made = call(cat)
    assert [node.name for node in made.operands] == ["exp", "arg1_1", "exp_1"] and made.attrs[
        "dim"
    ] == -2


def test_sizes_stay_symbolic():
    graph = nodes(lambda x: x.view(-1, 8).exp(), X, dynamic=True)
    [shape] = [call(node).attrs["shape"] for node in graph if call(node).op == "view"]
    assert isinstance(shape[0], torch.SymInt) and shape[1] == 8


def test_half_of_a_dynamic_width_is_the_same_half_however_it_is_cut():
    torch._dynamo.mark_dynamic(x := torch.randn(3, 10), 1)
    made = [call(node) for node in nodes(lambda x: x[:, x.shape[1] // 2 :].exp(), x, dynamic=None)]
    [first] = [found.attrs for found in made if found.op == "slice"]
    assert first["end"] is None and isinstance(first["start"], torch.SymInt)


def test_a_part_of_a_split_follows_what_is_split():
    graph = functional_graph(lambda x: x.exp().chunk(2, -1)[1].neg(), X)
    (exp,) = graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)
    part = next(node for node in graph.nodes if call(node).op == "slice" and node.users)
    assert call(part).operands == [exp]
    exp.replace_all_uses_with(exp.args[0])
    assert call(part).operands == [exp.args[0]]


def test_the_call_follows_an_edit_of_the_node():
    graph = functional_graph(lambda x: x.mean(-1), X)
    (mean,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mean.dim)
    assert call(mean).attrs["dim"] == (-1,)
    mean.args = (mean.args[0], [0])
    assert call(mean).attrs["dim"] == (-3,)


@pytest.mark.parametrize(
    ("function", "keeps"),
    [
        (lambda x: x.view(12, 8), True),
        (lambda x: x.view(2, 48), False),
        (lambda x: x[None], True),
        (lambda x: x[..., None], False),
    ],
)
def test_whether_a_view_keeps_rows_whole(function, keeps):
    view = next(node for node in nodes(lambda x: function(x).exp(), X) if call(node).op == "view")
    assert keeps_last_dim(view) == keeps


def test_a_node_is_spelled_without_what_goes_without_saying():
    def function(x, y):
        total = torch.add(x, y).mean(-1, keepdim=True).to(torch.bfloat16)
        return total, x[..., :4].exp(), F.gelu(y), x.chunk(2, -1)[1].neg(), x.topk(2)[1]

    spelled = [spell(node) for node in nodes(function, X, X + 1)]
    assert spelled == [
        "add",
        "mean(dim=(-1,), keepdim=True)",
        "cast(dtype=bfloat16)",
        "slice(dim=-1, start=0, end=4)",
        "exp",
        "gelu",
        "slice(dim=-1, start=4)",
        "neg",
        "result 1 of topk(k=2)",
    ]


def test_an_input_is_called_what_the_program_calls_it():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
            self.register_buffer("table", torch.zeros(8))

        def forward(self, hidden):
            return self.layers[0](hidden) + self.table

    graph = functional_graph(Model().requires_grad_(False), X)
    assert {spell(node) for node in graph.find_nodes(op="placeholder")} == {
        "input hidden",
        "input layers.0.weight",
        "input layers.0.bias",
        "input table",
    }


def test_what_is_no_call_has_only_a_kind():
    graph = functional_graph(lambda x: x.exp(), X)
    assert (
        call(next(iter(graph.nodes))) == Call("placeholder", [], {})
        and call(graph.output_node()).op == "output"
    )
