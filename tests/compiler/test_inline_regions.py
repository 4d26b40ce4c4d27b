"""What AOTAutograd is shown of a graph with regions, and what stands in their place when it is
done.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import atomc
from atomc.capture import functional
from atomc.graph.node_record import record_of
from atomc.torch_compat import tracing

EAGER: dict[str, Any] = {"glue": "eager", "strict": True}
X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.gate(x)) * self.up(x)


class Stack(nn.Module):
    def __init__(
        self, depth: int = 4, around: Callable[[nn.ModuleList, Tensor], Any] | None = None
    ):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.around = nn.ModuleList(Layer() for _ in range(depth)), around or in_a_row
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.around(self.layers, x)


def in_a_row(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def scaled_between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x) / (i + 2)
    return x


def all_states(layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    states = [x]
    for layer in layers:
        states.append(layer(states[-1]))
    return states


def two_at_once(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[0](x) + layers[1](layers[0](layers[3](x)))


def weight_read_outside(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return in_a_row(layers, x) @ layers[2].gate.weight + layers[0].up.weight.sum()


def first_read_last(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = layers[0](x)
    return in_a_row(layers[1:], first) - first.relu()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(inputs, nodes) of each graph that AOTAutograd was shown."""
    seen: list[tuple[int, int]] = []

    def functional_graph(gm: GraphModule, fakes: Sequence[Any]) -> tracing.Functional:
        seen.append((len(fakes), len(gm.graph.nodes)))
        return tracing.functional_graph(gm, fakes)

    monkeypatch.setattr(functional, "functional_graph", functional_graph)
    return seen


def compiled(model: nn.Module, x: Tensor = X) -> Any:
    return torch.compile(atomc.prepare(model), backend="atom", fullgraph=True, options=EAGER)(x)


def note() -> str:
    return "; ".join(text for text in atomc.reports()[-1].notes if "traced" in text)


def test_aot_autograd_is_shown_as_much_of_many_layers_as_of_few(
    shown: list[tuple[int, int]],
) -> None:
    compiled(Stack(3))
    few = shown.copy()
    compiled(Stack(9))
    assert shown[len(few) :] == few and [inputs for inputs, _ in few] == [5, 0]
    assert note() == "1 layer traced, 9 inlined"


AROUND = [in_a_row, scaled_between, all_states, two_at_once, weight_read_outside, first_read_last]


@pytest.mark.parametrize("around", AROUND)
def test_calls_may_stand_in_a_row_or_apart_and_others_may_read_what_they_read_and_make(
    around: Callable[[nn.ModuleList, Tensor], Any],
) -> None:
    model = Stack(around=around)
    torch.testing.assert_close(compiled(model), model(X), rtol=0, atol=1e-5)
    assert note() == "1 layer traced, 4 inlined"


def test_inputs_have_the_numbers_and_sources_that_dynamo_gave_them() -> None:
    model = Stack(around=weight_read_outside)
    graphs: list[GraphModule] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = functional.capture(functional.dynamo_graph(gm, inputs, {}), inputs)
        graphs.append(captured.graph)
        for node, given in zip(
            captured.graph.graph.find_nodes(op="placeholder"), inputs, strict=True
        ):
            value = node.meta["val"]
            assert (value.shape, value.stride()) == (given.shape, given.stride())
            assert value.fake_mode is not None and not value.requires_grad
        return captured.wrap(captured.graph.forward)

    torch._dynamo.reset()
    out = torch.compile(atomc.prepare(model), backend=backend, fullgraph=True)(X)
    torch.testing.assert_close(out, model(X), rtol=0, atol=1e-5)
    placeholders = graphs[0].graph.find_nodes(op="placeholder")
    assert [node.name for node in placeholders] == [f"arg{i}_1" for i in range(1 + 4 * 4)]
    assert len({record_of(node).source for node in placeholders}) == len(placeholders)


def test_where_aot_autograd_does_something_around_the_graph_every_layer_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "added_by_aot", lambda functional, num_inputs: "it does something")
    model = Stack()
    torch.testing.assert_close(compiled(model), model(X), rtol=0, atol=1e-5)
    assert (
        note()
        == "every layer was traced, because tracing regions failed: CannotInline: it does something"
    )
