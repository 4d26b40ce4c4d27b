"""Graphs with tensor subclasses are left to Inductor, with the class named, and compute what eager
does.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import atomc
from atomc.capture.subclasses import is_subclass


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Returned(Tensor):
    """Results of operations on it are of its class."""


class Named(nn.Parameter):
    """As vLLM's parameters: results are plain tensors."""


def two(x: Tensor) -> Tensor:
    return TwoTensor(x, x.clone())  # type: ignore[no-untyped-call, no-any-return]


def model(convert: Callable[[Tensor], Tensor] = lambda x: x, kind: type[nn.Module] = Mlp) -> Any:
    """Each weight of a linear layer converted."""
    torch.manual_seed(0)
    made = kind().eval().requires_grad_(False)
    for layer in made.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(convert(layer.weight.data), requires_grad=False)
    return made


def jagged() -> Tensor:
    parts = [torch.randn(3, 8), torch.randn(5, 8)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def makes_two(x: Tensor) -> Tensor:
    return two(x) * 2


def makes_jagged(values: Tensor, offsets: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    result: Tensor = F.silu(nested).values()
    return result


def ends_twice(x: Tensor) -> Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y + 1


X = torch.randn(3, 8)
OFFSETS = torch.tensor([0, 2, 3])
# (program, its arguments, what the reason says)
PROGRAMS: list[tuple[Any, tuple[Tensor, ...], str]] = [
    (model(two), (X,), "gate.weight is a tensor subclass, TwoTensor of torch.testing"),
    (model(two, Layers), (X,), "layers.0.gate.weight is a tensor subclass, TwoTensor of"),
    (
        model(lambda x: x.as_subclass(Returned)),  # type: ignore[arg-type, return-value]
        (X,),
        f"gate.weight is a tensor subclass, Returned of {__name__}",
    ),
    (model(), (two(X),), "the argument 0 is a tensor subclass, TwoTensor of"),
    (model(), (jagged(),), "the argument 0 is a tensor subclass, NestedTensor of torch.nested"),
    (makes_two, (X,), "the graph makes a tensor subclass, TwoTensor of torch.testing"),
    (makes_jagged, (X, OFFSETS), "the graph makes a tensor subclass, NestedTensor of"),
    (ends_twice, (jagged(),), "the argument x is a tensor subclass, NestedTensor of"),
]


@pytest.mark.parametrize(("program", "args", "reason"), PROGRAMS)
def test_the_class_is_named(program: Any, args: tuple[Tensor, ...], reason: str) -> None:
    report = atomc.explain(program, *args)
    assert not report.treated
    assert f"the graph was not treated: {reason}" in report.why("rms_norm")
    assert "which atomc does not compile: pass plain tensors" in report.why("rms_norm")


def same(a: Tensor, b: Tensor) -> None:
    assert type(a) is type(b)
    if isinstance(a, TwoTensor):
        same(a.a, b.a)  # type: ignore[attr-defined]
        same(a.b, b.b)  # type: ignore[attr-defined]
    else:
        torch.testing.assert_close(
            a.values() if a.is_nested else a, b.values() if b.is_nested else b
        )


@pytest.mark.parametrize(
    ("program", "args"),
    [
        (atomc.prepare(model(two, Layers)), (X,)),
        (makes_two, (X,)),
        (F.silu, (jagged(),)),
    ],
)
def test_results_are_those_of_eager(
    program: Any, args: tuple[Tensor, ...], caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "atomc"):
        found = torch.compile(program, backend="atom", options={"strict": True})(*args)
    same(found, program(*args))
    assert "a tensor subclass" in atomc.reports()[-1].why("rms_norm")
    assert [record for record in caplog.records if record.name == "atomc"] == []


def test_a_parameter_whose_results_are_plain_is_compiled() -> None:
    named = model()
    for layer in (named.gate, named.up, named.down):
        layer.weight = Named(layer.weight.data, requires_grad=False)
    assert atomc.explain(named, X).treated
    assert not is_subclass(Named(X)) and not is_subclass(X) and not is_subclass(nn.Buffer(X))


def test_the_runtime_names_the_weight() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.mlp = model(two)

        def forward(
            self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor | None = None
        ) -> Tensor:
            out: Tensor = self.mlp(self.embed(input_ids))
            return out if logits_rows is None else out[logits_rows]

    with pytest.raises(ValueError, match=r"mlp.gate.weight is a tensor subclass, TwoTensor of "):
        atomc.LLM(Language().eval().requires_grad_(False), max_model_len=16)
