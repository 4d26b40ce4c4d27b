"""Linears of one input become one: which do, which are left alone, and what the graph becomes."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from merged_models import (
    EAGER,
    UNMERGED,
    Attention,
    Gated,
    Layer,
    X,
    close,
    compiled,
    fresh,
    last,
    live_bytes,
    merges,
    own,
    ready,
    stock,
    weights,
    whole,
    widths,
)
from rewriting import STRIDES_HOLD
from torch import Tensor, nn

import atomc
from atomc import ops
from atomc.compiler.pipeline import register_pass
from atomc.program import compile_model


@pytest.fixture
def layer() -> Layer:
    return fresh(Layer)


@pytest.fixture
def mlp() -> Gated:
    return fresh(Gated)


# What is merged


@pytest.mark.parametrize("bias", [False, True])
def test_qkv_and_gate_up_become_one_linear_each(bias: bool) -> None:
    torch.manual_seed(0)
    model = ready(Layer(bias))
    expected = model(X)
    close(compiled(model)(X), expected)
    assert merges() == {"merge_qkv": 1, "merge_gate_up": 1} and last().num_ops["linear"] == 4
    close(model(X), expected)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "bias"),
    [
        ("Qwen3", False),
        ("Llama", True),
        pytest.param("Qwen3", True, marks=pytest.mark.slow),
        pytest.param("Llama", False, marks=pytest.mark.slow),
    ],
)
def test_stock_models_merge_in_every_layer_and_nothing_else_changes(kind: str, bias: bool) -> None:
    model = stock(kind, attention_bias=bias, **({"mlp_bias": bias} if kind == "Llama" else {}))
    ids = torch.randint(0, 128, (2, 9))
    expected = model(ids, use_cache=False).logits
    close(compiled(model, **UNMERGED)(ids, use_cache=False).logits, expected)
    without = last()
    close(compiled(model)(ids, use_cache=False).logits, expected)
    assert merges() == {"merge_qkv": 2, "merge_gate_up": 2}
    assert (last().num_ops["linear"], without.num_ops["linear"]) == (4 * 2 + 1, 7 * 2 + 1)
    others = {name: n for name, n in last().matches.items() if name != "lower"}
    assert others == {
        **{name: n for name, n in without.matches.items() if name != "lower"},
        **merges(),
    }


@pytest.mark.rotating
def test_programs_for_the_runtime_merge_and_share_packs_with_the_backend() -> None:
    model = own()
    ids = torch.arange(9)
    expected = model(ids, ids)
    before = live_bytes()
    programs = [compile_model(model, options=EAGER) for _ in range(2)]
    close(compiled(model)(ids, ids), expected)
    assert all(
        merges(program.report) == {"merge_qkv": 2, "merge_gate_up": 2} for program in programs
    )
    assert merges() == {"merge_qkv": 2, "merge_gate_up": 2}
    mlp = model.model.layers[0].mlp
    assert live_bytes() - before < whole(*weights(mlp.gate_proj, mlp.up_proj)).nbytes


@pytest.mark.rotating
def test_a_model_on_the_meta_device_is_counted_and_explained() -> None:
    report = atomc.explain(own("meta"))
    assert merges(report) == {"merge_qkv": 2, "merge_gate_up": 2}
    assert report.why("merge_qkv").startswith("merge_qkv: fired at 2 sites in layers 0-1")
    assert merges(compile_model(own("meta"), options=EAGER).report) == {
        "merge_qkv": 2,
        "merge_gate_up": 2,
    }


def test_linears_that_are_neither_are_merged_too() -> None:
    a, b = (ready(nn.Linear(32, n)) for n in (7, 3))

    def both(x: Tensor) -> Tensor:
        return a(x).sum(-1) + b(x).sum(-1)

    close(compiled(both)(X), both(X))
    assert merges() == {"merge_linears": 1} and widths() == [[7, 3]]


def test_linears_with_and_without_a_bias_are_merged_among_themselves() -> None:
    model = Attention()
    model.q, model.v = nn.Linear(32, 32), nn.Linear(32, 16)
    ready(model)
    close(compiled(model)(X), model(X))
    assert merges() == {"merge_linears": 1} and widths() == [[32, 16]]


def test_the_rows_of_the_gate_are_before_those_of_up() -> None:
    class UpFirst(Gated):
        def forward(self, x: Tensor) -> Tensor:
            up = self.up(x)
            return self.down(F.silu(self.gate(x)) * up)  # type: ignore[no-any-return]

    model = ready(UpFirst())
    close(compiled(model)(X), model(X))
    assert merges() == {"merge_gate_up": 1}
    assert "silu_and_mul(getitem, getitem_1)" in last().stages[-1].text


def test_products_that_round_to_other_dtypes_are_left_apart() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Parameter(torch.randn(16, 32).to(torch.float8_e4m3fn), requires_grad=False)
                for _ in range(2)
            )
            self.scales = nn.ParameterList(torch.rand(16, 1) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            codes, scale = ops.quant_fp8_per_token(x, torch.float8_e4m3fn)
            product = partial(ops.scaled_linear_fp8, codes)
            return (
                product(self.first, scale, self.scales[0], out_dtype=torch.bfloat16),
                product(self.second, scale, self.scales[1], out_dtype=torch.float16),
            )

    model = ready(Codes())
    for result, expected in zip(compiled(model)(X), model(X), strict=True):
        assert result.dtype == expected.dtype
        close(result, expected)
    assert not merges()


def test_linears_of_different_layers_are_left_apart() -> None:
    """The keys of an encoder's output in all layers of a decoder: merged they would be one huge
    result, kept to the end.
    """
    layers = ready(nn.ModuleList(nn.Linear(32, 8) for _ in range(3)))

    def run(x: Tensor) -> list[Tensor]:
        return [layer(x).relu() for layer in layers]

    for ours, theirs in zip(compiled(run)(X), run(X), strict=True):
        close(ours, theirs)
    assert merges() == {}


@pytest.mark.parametrize("off", ["merge_qkv", "merge_gate_up"])
def test_each_kind_can_be_left_out(layer: nn.Module, off: str) -> None:
    close(compiled(layer, passes={off: False})(X), layer(X))
    assert merges() == {name: 1 for name in ("merge_qkv", "merge_gate_up") if name != off}
    assert "the pass is off" in last().why(off)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_within_its_own_rounding(
    layer: nn.Module, dtype: torch.dtype
) -> None:
    layer.to(dtype)
    x = X.to(dtype)
    torch.testing.assert_close(
        compiled(layer)(x), compiled(layer, **UNMERGED)(x), rtol=0, atol=torch.finfo(dtype).eps * 4
    )
    assert merges() == {} and merges(atomc.reports()[-2]) == {"merge_qkv": 1, "merge_gate_up": 1}


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_merged_linears_go_through_inductor(layer: nn.Module, dynamic: bool) -> None:
    run = torch.compile(layer, backend="atom", dynamic=dynamic, options={"glue": "inductor"})
    for x in (X, torch.cat([X, X], 1)):
        close(run(x), layer(x))
    assert merges() == {"merge_qkv": 1, "merge_gate_up": 1}


def test_each_value_of_a_python_float_is_compiled_with_the_merge(mlp: Gated) -> None:
    def run(x: Tensor, factor: float) -> Tensor:
        return mlp(x * factor)  # type: ignore[no-any-return]

    both = torch.compile(run, backend="atom", dynamic=True, options=EAGER)
    for factor in (0.5, 2.5):
        close(both(X, factor), run(X, factor))
    assert merges() == {"merge_gate_up": 1}


# What is left alone


def test_a_weight_that_is_read_elsewhere_is_left_alone() -> None:
    embedding, head, other = (
        nn.Embedding(40, 32),
        nn.Linear(32, 40, bias=False),
        nn.Linear(32, 8, bias=False),
    )
    head.weight = embedding.weight
    for module in (embedding, head, other):
        ready(module)

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        x = embedding(ids)
        return head(x) * 2, other(x) * 2

    ids = torch.arange(5)
    for ours, theirs in zip(compiled(run)(ids), run(ids), strict=True):
        close(ours, theirs)
    assert merges() == {} and "weight has other readers" in last().why("merge_linears")


def test_weights_that_are_no_parameters_are_left_alone() -> None:
    a, b = torch.randn(8, 32), torch.randn(8, 32)

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, a) * F.linear(x, b)

    close(compiled(run)(X, a, b), run(X, a, b))
    assert merges() == {} and "it is a Tensor, not a parameter" in last().why("merge_linears")


def test_a_weight_whose_memory_somebody_else_looks_at_is_left_alone(mlp: Gated) -> None:
    held = mlp.state_dict()
    close(compiled(mlp)(X), mlp(X))
    assert merges() == {} and "another tensor shares its memory" in last().why("merge_gate_up")
    held["gate.weight"].mul_(2)
    close(compiled(mlp)(X), mlp(X))
    del held
    torch._dynamo.reset()
    close(compiled(mlp)(X), mlp(X))
    assert merges() == {"merge_gate_up": 1}


def test_a_weight_that_is_part_of_a_larger_storage_is_left_alone(mlp: Gated) -> None:
    flat = torch.randn(2, 48, 32)
    mlp.gate.weight.data, mlp.up.weight.data = flat[0], flat[1]
    run = compiled(mlp)
    close(run(X), mlp(X))
    flat.mul_(2)
    close(run(X), mlp(X))
    assert merges() == {} and "part of a larger storage" in last().why("merge_gate_up")


def test_two_models_that_share_a_weight_are_right_after_every_change() -> None:
    torch.manual_seed(0)
    one, two = ready(Gated()), ready(Gated())
    two.gate.weight = one.gate.weight
    first, second = (
        compiled(one),
        torch.compile(lambda x: two(x) * 1, backend="atom", options=EAGER),
    )
    for _ in range(2):
        close(first(X), one(X))
        close(second(X), two(X))
        one.gate.weight.mul_(2)
        two.up.weight.mul_(2)
    assert merges(atomc.reports()[-2]) == {"merge_gate_up": 1} and merges() == {}
    assert "packed with others for another graph" in last().why("merge_gate_up")
    assert "packed" in [miss.kind for miss in last().misses("merge_gate_up")]


class Lora(nn.Module):
    """A linear with a low-rank update beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2.0  # type: ignore[no-any-return]


def test_linears_wrapped_by_lora_are_right_before_and_after_folding_the_update(
    layer: nn.Module,
) -> None:
    layer.attention.q = ready(Lora(layer.attention.q, 4))
    layer.mlp.gate = ready(Lora(layer.mlp.gate, 4))
    run = compiled(layer)
    close(run(X), layer(X))
    for lora in (layer.attention.q, layer.mlp.gate):
        lora.base.weight += 2.0 * lora.b.weight @ lora.a.weight
        lora.b.weight.zero_()
    close(run(X), layer(X))


# The graph


def test_every_value_has_the_strides_that_running_gives(layer: nn.Module) -> None:
    with register_pass(STRIDES_HOLD):
        close(compiled(layer)(X), layer(X))
    assert merges() == {"merge_qkv": 1, "merge_gate_up": 1}


def test_a_part_that_is_returned_is_a_tensor_of_its_own(mlp: Gated) -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return mlp.gate(x), mlp.up(x).transpose(0, 1)

    ours, theirs = compiled(both)(X), both(X)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
        assert a.stride() == b.stride() and a.untyped_storage().nbytes() == a.nbytes
    assert merges() == {"merge_linears": 1}


@pytest.mark.parametrize(
    "view", [lambda x: x.view(-1), lambda x: x.as_strided((3, 4), (1, 2)), lambda x: x.view(10, -1)]
)
def test_views_of_any_kind_behind_a_part_are_right(
    mlp: Gated, view: Callable[[Tensor], Tensor]
) -> None:
    def run(x: Tensor) -> Tensor:
        return view(mlp.gate(x)).sum() * view(mlp.up(x)).sin().sum()

    for dynamic in (False, True):
        torch._dynamo.reset()
        close(torch.compile(run, backend="atom", dynamic=dynamic, options=EAGER)(X), run(X))
        assert merges() == {"merge_linears": 1}
