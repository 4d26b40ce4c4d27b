"""The linear layer to gate and up computes their gate where one provider has kernels for all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Traced, after_passes
from torch import Tensor, nn

import atomc
from atomc import ops, passes
from atomc.compiler.select import Selection
from atomc.options import Options
from atomc.platform import Platform
from atomc.report.kernel_ranges import choices_by_op
from atomc.rewriting.graph_pass import Context
from atomc.token_range import Tokens

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

NAMES = ("tidy", "silu_and_mul", "gelu_and_mul", "silu_and_mul_quant", "linear_gated")
ENABLED = [p for p in passes.PIPELINE if p.name in NAMES]
RANDOM = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM).bfloat16()


X, W, B = rand(5, 64), rand(48, 64), rand(48)


def fused(function: Callable[..., Any], *inputs: Tensor, platform: str = "h200") -> Traced:
    """The graph after the passes, with the kernels of a platform."""
    where = Platform.named(platform)
    rows = inputs[0].shape[0]
    selection = Selection(Options(), where, eager=False, tokens=Tokens(rows, rows))
    context = Context(Options(), where, choose=selection.choose, first=selection.first)
    traced = after_passes(ENABLED, function, *inputs, context=context)
    assert traced.error == 0.0
    return traced


def gate_of(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def chunks(y: Tensor) -> tuple[Tensor, ...]:
    return y.chunk(2, -1)


SPLITS = {
    "chunk": chunks,
    "split": lambda y: y.split([24, 24], -1),
    "slices": lambda y: (y[..., :24], y[..., 24:]),
    "narrow": lambda y: (y.narrow(-1, 0, 24), y.narrow(-1, 24, 24)),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_product_and_the_gate_of_its_halves_become_one_op(split: str) -> None:
    traced = fused(lambda x, w: gate_of(*SPLITS[split](F.linear(x, w))), X, W)
    assert traced.text == "%0 = linear_gated(x, w, None, 'silu')\nreturn %0"


@pytest.mark.parametrize(("approximate", "activation"), [("none", "gelu"), ("tanh", "gelu_tanh")])
def test_gates_of_gelu_are_fused_with_their_kind(approximate: str, activation: str) -> None:
    def geglu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        gate, up = F.linear(x, w, b).chunk(2, -1)
        return F.gelu(gate, approximate=approximate) * up

    traced = fused(geglu, X, W, B)
    assert traced.text == f"%0 = linear_gated(x, w, b, '{activation}')\nreturn %0"
    assert traced.report.matches["linear_gated"] == 1


def halves_and(change: Callable[..., Any]) -> Callable[[Tensor, Tensor], Any]:
    return lambda x, w: change(F.linear(x, w))


def two_readers(y: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = y.chunk(2, -1)
    return gate_of(gate, up), up.abs()


LEFT_ALONE = {
    "another reader of the product": halves_and(lambda y: (gate_of(*chunks(y)), y.abs())),
    "another reader of a half": halves_and(two_readers),
    "up before gate": halves_and(lambda y: gate_of(*reversed(chunks(y)))),
    "a gate of itself": halves_and(lambda y: gate_of(y, y)),
    "a gate of one half": halves_and(lambda y: gate_of(y[..., :24], y[..., :24])),
    "halves that overlap": halves_and(lambda y: gate_of(y[..., :25], y[..., 23:])),
    "columns behind them": halves_and(lambda y: gate_of(y[..., :20], y[..., 20:40])),
    "halves of the rows": lambda x, w: gate_of(*F.linear(x[:4], w).chunk(2, 0)),
    "every second column": halves_and(lambda y: gate_of(y[..., ::2], y[..., 1::2])),
    "sigmoid": halves_and(lambda y: ops.sigmoid_and_mul(*chunks(y))),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_gate_of_both_halves_is_left_alone(name: str) -> None:
    text = fused(LEFT_ALONE[name], X, W).text
    assert "= linear(" in text and "linear_gated" not in text


def silu(x: Tensor, w: Tensor) -> Tensor:
    return gate_of(*F.linear(x, w).chunk(2, -1))


@pytest.mark.parametrize(
    ("rows", "columns", "platform"),
    [(17, 64, "h200"), (5, 2560, "h200"), (5, 64, "gfx950"), (5, 64, "cpu")],
)
def test_where_the_product_has_other_kernels_it_stays_a_product(
    rows: int, columns: int, platform: str
) -> None:
    traced = fused(silu, rand(rows, columns), rand(48, columns), platform=platform)
    assert "= linear(" in traced.text and not traced.report.near


class MLP(nn.Module):
    """The MLP of a layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gate_of(self.gate(x), self.up(x)))


@pytest.mark.parametrize("off", [False, True])
def test_of_a_graph_for_any_number_of_tokens_the_part_for_few_is_fused(off: bool) -> None:
    mlp = MLP().bfloat16().requires_grad_(False)
    options = {"passes": {"linear_gated": False}} if off else None
    report = atomc.explain(mlp, X, platform="h200", dynamic=True, options=options)
    served = {(choice.op, choice.tokens) for choice in report.kernels}
    assert (("linear_gated", "1 to 16") in served) is not off
    assert (("silu_and_mul", "1 to 16") in served) is off
    assert ("silu_and_mul", "17 and more") in served
    assert report.matches["linear_gated"] == (0 if off else 1)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "phi3"])
def test_the_gates_of_stock_models_are_fused(kind: str) -> None:
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=99,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    report = atomc.explain(
        model.requires_grad_(False), torch.arange(5)[None], use_cache=False, platform="h200"
    )
    assert report.matches["linear_gated"] == 2


def test_the_page_shows_the_kernel_of_each_range_for_both_of_its_ops() -> None:
    mlp = MLP().bfloat16().requires_grad_(False)
    report = atomc.explain(mlp, X, platform="h200", dynamic=True)
    of_op = choices_by_op(report.kernels)
    kernels = {
        (cost.op, cost.module_path): [(choice.op, choice.chosen) for choice in of_op(cost)]
        for cost in report.costs
    }
    assert kernels["silu_and_mul", ""] == [("linear_gated", "triton"), ("silu_and_mul", "triton")]
    assert sorted(runs for (op, _), runs in kernels.items() if op == "linear") == [
        [("linear", "triton"), ("linear", "cuda")],
        [("linear_gated", "triton"), ("linear", "cuda")],
    ]
