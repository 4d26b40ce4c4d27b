"""Paths and numbers of layers are those of the module tree, however a function gets its modules."""

import functools

import pytest
import torch
from torch import Tensor, nn

import atomc
from atomc.report.report import Report


def passing_on(forward):
    """A decorator that names no argument, as transformers' deprecate_kwarg."""

    @functools.wraps(forward)
    def wrapped(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Decorated(Model):
    forward = passing_on(Model.forward)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decorated()

    @passing_on
    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


X = torch.randn(2, 16)


def report_of(function, *args, **named) -> Report:
    with torch.inference_mode():
        out = torch.compile(function, backend="atom", options={"glue": "eager"})(*args, **named)
        torch.testing.assert_close(out, function(*args, **named))
    return atomc.reports()[-1]


def norms(report: Report) -> list[str]:
    return [site.module_path for site in report.sites if site.rewrite == "rms_norm"]


NORMS = [f"layers.{number}.norm" for number in range(3)]


def run(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def with_other(*modules_and_x):
    model, other, x = modules_and_x
    return other(model(x))


CALLS = {
    "forward": (Model(), (X,), NORMS),
    "decorated": (Decorated(), (X,), NORMS),
    "decorated, below a decorated module": (Outer(), (X,), [f"model.{path}" for path in NORMS]),
    "packed arguments": (lambda *pack: pack[0](pack[1]), (Model(), X), NORMS),
    "two modules in packed arguments": (with_other, (Model(), nn.Linear(16, 16), X), NORMS),
    "a pair": (lambda pair: pair[0](pair[1]), ((Model(), X),), NORMS),
    "a list of layers": (run, ([Block(), Block()], X), ["0.norm", "1.norm"]),
    "a tuple of layers": (run, ((Block(), Block()), X), ["0.norm", "1.norm"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_paths_are_those_of_the_tree(name: str) -> None:
    function, args, expected = CALLS[name]
    report = report_of(function, *args)
    assert norms(report) == expected
    assert report.num_layers == len(expected)


def test_names_of_keywords_are_no_part_of_a_path() -> None:
    def function(x: Tensor, **modules: nn.Module) -> Tensor:
        return modules["first"](x)

    assert norms(report_of(function, X, first=Model())) == NORMS


def test_a_contract_counts_the_layers_of_a_decorated_model() -> None:
    options = {"glue": "eager", "expect": {"rms_norm": "1*layers"}}
    with torch.inference_mode():
        torch.compile(Decorated(), backend="atom", options=options)(X)
    assert "layers 0-2" in atomc.reports()[-1].why("rms_norm")


def test_a_layer_that_is_used_twice_has_a_path_for_each_use() -> None:
    model = Decorated()
    model.layers[1] = model.layers[0]
    assert norms(report_of(model, X)) == ["layers.0.norm", "layers.0.norm", "layers.2.norm"]
