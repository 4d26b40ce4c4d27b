"""A product of operands that a model casts from 16 bits to fp32 is one op, on the operands as they
are stored.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes, explained, rewritten
from torch import Tensor, nn

import atomc
from atomc import ops, passes
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.ops.inputs import LoraShape
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Context
from atomc.token_range import Tokens

transformers = pytest.importorskip("transformers")

LINEAR_FP32 = next(each for each in passes.PIPELINE if each.name == "linear_fp32")
T, E, D = 6, 8, 24
X, W, B = torch.randn(T, D).bfloat16(), torch.randn(E, D).bfloat16(), torch.randn(E)
# Sums in another order.
TOLERANCE = 1e-6
STRICT = {"strict": True, "glue": "eager"}
LAYERS = 2
TINY = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=1,
    n_shared_experts=1,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=0,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=48,
    qk_nope_head_dim=32,
    qk_rope_head_dim=8,
    v_head_dim=24,
)
KINDS = {
    "deepseek_v3": TINY | LATENT,
    "glm4_moe": TINY | {"num_key_value_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "cast",
    [Tensor.float, lambda x: x.type(torch.float32), lambda x: x.to(torch.float32)],
    ids=["float", "type", "to"],
)
def test_a_product_of_two_casts_is_one_op(
    cast: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(cast(x), cast(weight))

    assert (
        rewritten(LINEAR_FP32, function, X.to(dtype), W.to(dtype), tolerance=TOLERANCE)
        == """\
%0 = linear_fp32(x, weight)
return %0"""
    )


@pytest.mark.parametrize("shape", [(D,), (T, D), (2, 3, D)])
def test_rows_may_have_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).bfloat16()
    dynamic = len(shape) > 1
    function = lambda x, weight: F.linear(x.float(), weight.float())  # noqa: E731
    text = rewritten(LINEAR_FP32, function, x, W, dynamic=dynamic, tolerance=TOLERANCE)
    assert "linear_fp32" in text and "_to_copy" not in text


def test_a_cast_that_others_read_stays_for_them() -> None:
    def function(x: Tensor, weight: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        wide = x.float()
        return F.linear(wide, weight.float()), F.linear(wide, other.float()), wide.sin()

    text = rewritten(LINEAR_FP32, function, X, W, 2 * W, matches=2, tolerance=TOLERANCE)
    assert (
        text
        == """\
%0 = _to_copy(x, dtype=float32)
%1 = linear_fp32(x, weight)
%2 = linear_fp32(x, other)
%3 = sin(%0)
return %1, %2, %3"""
    )


def test_a_result_that_is_cast_to_16_bits_is_rounded_once() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float()).bfloat16()

    text = rewritten(LINEAR_FP32, function, X, W, tolerance=2**-7)
    assert "%0 = linear_fp32(x, weight)" in text and "dtype=bfloat16" in text


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x.float(), weight.float(), bias)


@pytest.mark.parametrize(
    ("function", "inputs", "kind", "expected", "found"),
    [
        (product, (X, W.float()), "dtype", "a weight in 16 bits, cast to fp32", "weight in fp32"),
        (product, (X.float(), W), "dtype", "x in 16 bits, cast to fp32", "input x in fp32"),
        (product, (X.half(), W), "dtype", "a weight in torch.float16, as x", "torch.bfloat16"),
        (product, (X, W, B), "arguments", "no bias", "input bias is added"),
        (
            lambda x, weight: F.linear(x.float().sin(), weight.float()),
            (X, W),
            "dtype",
            "x in 16 bits, cast to fp32",
            "sin",
        ),
    ],
    ids=["fp32 weight", "fp32 x", "other dtype", "bias", "computed in fp32"],
)
def test_a_product_that_is_left_names_the_reason(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    kind: str,
    expected: str,
    found: str,
) -> None:
    report = explained(function, *inputs, tolerance=TOLERANCE)
    assert not report.matches["linear_fp32"]
    [miss] = report.misses("linear_fp32")
    assert (miss.kind, miss.expected) == (kind, expected) and found in miss.found
    assert miss.text() in report.why("linear_fp32")


@pytest.mark.parametrize(("targets", "count"), [((), 0), (("q_proj",), 1)])
def test_a_layer_that_adapters_may_change_is_left(targets: tuple[str, ...], count: int) -> None:
    context = Context(Options(), Platform.detect("cpu"), lora=LoraShape(1, 4, targets))
    report = after_passes([LINEAR_FP32], product, X, W, context=context).report
    assert report.matches["linear_fp32"] == count
    assert ["LoRA adapters" in miss.found for miss in report.near] == [True] * (1 - count)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: F.linear(x, weight).float(),
        lambda x, weight: F.linear(x.double(), weight.double()),
        lambda x, weight: F.linear(x, weight) + x.float().sum(),
    ],
    ids=["the result is cast", "fp64", "a cast elsewhere"],
)
def test_a_product_in_another_dtype_is_no_near_miss(function: Callable[..., Tensor]) -> None:
    report = explained(function, X, W)
    assert not report.matches["linear_fp32"] and not report.misses("linear_fp32")


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(W.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        weights, ids = scores.topk(3, -1)
        return weights / weights.sum(-1, keepdim=True), ids


class Routers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Router(), Router()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return *self.first(x), *self.second(x)


def of_routers(**options: Any) -> Report:
    return atomc.explain(Routers(), X, options=STRICT | {"passes": options})


def test_a_router_takes_the_result_and_an_option_turns_it_off_in_a_module() -> None:
    matches = of_routers().matches
    assert (matches["linear_fp32"], matches["topk_route"]) == (2, 2)
    report = of_routers(linear_fp32=["second"])
    assert report.matches["linear_fp32"] == 1
    assert [miss.module_path for miss in report.misses("linear_fp32")] == ["second"]
    assert not of_routers(linear_fp32=False).matches["linear_fp32"]


def test_a_router_that_computes_its_logits_takes_the_product_first() -> None:
    report = of_routers(linear_topk_route=True)
    assert report.matches["linear_topk_route"] == 2 and not report.matches["linear_fp32"]
    report = of_routers(linear_topk_route=["first"])
    assert (report.matches["linear_topk_route"], report.matches["linear_fp32"]) == (1, 1)


def stock(kind: str, dtype: torch.dtype) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.set_experts_implementation("grouped_mm")
    return model.eval().requires_grad_(False)


def own(dtype: torch.dtype) -> nn.Module:
    config = KINDS["deepseek_v3"] | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }
    return ready(create_model(config, dtype=dtype, device="meta"))


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        ("deepseek_v3", torch.bfloat16, 1),
        ("deepseek_v3", torch.float32, 0),
        ("glm4_moe", torch.bfloat16, 1),
    ],
)
def test_each_router_of_a_stock_model_in_16_bits_fires_once(
    kind: str, dtype: torch.dtype, count: int
) -> None:
    ids = torch.zeros(1, 7, dtype=torch.int64)
    model = stock(kind, dtype).to(dtype)  # transformers 5.24 has routers in fp32 otherwise
    report = atomc.explain(model, ids, options=STRICT)
    assert (report.matches["linear_fp32"], report.matches["topk_route"]) == (count, 1)
    assert not report.misses("linear_fp32")


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_a_router_of_our_model_runs_on_tensor_cores_and_other_fusions_stay(
    scheme: str | None,
) -> None:
    pytest.importorskip("triton")
    model = own(torch.bfloat16)
    if scheme is not None:
        atomc.quantize(model, scheme)
    report, off = (
        compile_model(model, STRICT | {"passes": passes}, Platform.named("h200")).report
        for passes in ({}, {"linear_fp32": False})
    )
    chosen = {
        choice.tokens: choice.chosen for choice in report.kernels if choice.op == "linear_fp32"
    }
    assert set(chosen.values()) == {"triton", "cuda"}
    for tokens, provider in chosen.items():
        assert provider == ("triton" if Tokens.of(tokens).within(Tokens(1, 16)) else "cuda")
    assert report.matches - off.matches == Counter(linear_fp32=1)
    assert off.matches - report.matches == Counter()


def test_the_meaning_differs_from_fp64_as_sums_in_fp32_do() -> None:
    x, weight = torch.randn(33, 4096).bfloat16(), torch.randn(17, 4096).bfloat16()
    exact = x.double() @ weight.double().t()
    error = (ops.linear_fp32(x, weight).double() - exact).abs().max()
    assert error <= 4096**0.5 * 2**-23 * exact.abs().max()
