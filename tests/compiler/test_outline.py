"""Layers that are alike, of a model that nobody prepared, are traced once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atomc

EAGER = {"glue": "eager", "strict": True}


class Layer(nn.Module):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 12), nn.Linear(8, 12)
        self.down, self.factor = nn.Linear(12, 8), factor
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.silu(self.gate(y)) * self.up(y) * self.factor
        y = y.view(-1, 12).view(*x.shape[:-1], 12)
        return x + self.down(y)


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, rounds: int = 1):
        super().__init__()
        self.layers, self.rounds = nn.ModuleList(layers), rounds

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return x


def note(model: nn.Module, *shapes: tuple[int, ...], dynamic: bool | None = None) -> str:
    """What the report says of tracing, after the compiled model gave the right results."""
    model = model.eval().requires_grad_(False)
    compiled = torch.compile(model, backend="atom", dynamic=dynamic, options=EAGER)
    for shape in shapes or ((3, 8),):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))
    return "; ".join(text for text in atomc.reports()[-1].notes if "traced" in text)


@pytest.mark.rotating
@pytest.mark.parametrize("dynamic", [True, False])
def test_layers_that_are_alike_are_traced_once_and_named_each(dynamic: bool) -> None:
    model = Stack(*(Layer() for _ in range(4)))
    assert note(model, (3, 5, 8), (2, 7, 8), dynamic=dynamic) == "1 layer traced, 4 inlined"
    assert [site.layer for site in atomc.reports()[-1].sites if site.rewrite == "silu_and_mul"] == [
        0,
        1,
        2,
        3,
    ]


def test_layers_with_another_constant_are_another_kind() -> None:
    layers = [Layer(), Layer(2.0), Layer(), Layer(2.0), Layer(), Layer(2.0), Layer(3.0)]
    assert note(Stack(*layers)) == "2 layers traced, 6 inlined"


def test_two_layers_are_traced_each() -> None:
    assert note(Stack(Layer(), Layer())) == ""


def test_layers_that_write_are_traced_each_and_write() -> None:
    model = Stack(*(Counting() for _ in range(3)))
    assert note(model) == ""
    assert [float(layer.calls) for layer in model.layers] == [
        2.0,
        2.0,
        2.0,
    ]  # once compiled, once not


def test_a_layer_that_is_entered_twice_is_traced_each_time() -> None:
    assert note(Stack(*(Layer() for _ in range(3)), rounds=2)) == ""


def test_a_value_that_a_later_layer_reads_leaves_its_layer() -> None:
    class Skipping(Stack):
        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for layer in self.layers:
                x = layer(x)
                kept.append(x)
            return x + kept[0] * kept[2]

    assert note(Skipping(*(Layer() for _ in range(4)))) == "1 layer traced, 4 inlined"
