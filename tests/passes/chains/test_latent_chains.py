"""The chains of latent attention, on graphs of stock DeepSeek-V3: how often each fires, and what
that costs others.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from latent import BIND_LATENT, Absorbed
from rewriting import explained, rewritten
from torch import Tensor, nn

import atomc
from atomc import ops, program
from atomc.compiler.pipeline import register_pass
from atomc.loading.create_model import create_model
from atomc.ops.formats import FP8
from atomc.passes import PIPELINE
from atomc.rewriting.rewrite import Rewrite

transformers = pytest.importorskip("transformers")

STRICT = {"strict": True, "glue": "eager"}
TINY = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=48,
    qk_nope_head_dim=32,
    qk_rope_head_dim=8,
    v_head_dim=24,
    n_routed_experts=4,
    n_group=1,
    num_experts_per_tok=2,
    topk_group=1,
    max_position_embeddings=64,
    pad_token_id=0,
)
LATENT = ("mla_attention", "linear_split_cat", "mla_rope_kv_write", "bmm_rope_kv_write")


def deepseek(layers: int, dtype: torch.dtype = torch.bfloat16, **differs: Any) -> nn.Module:
    """Stock DeepSeek-V3 with random weights, all of its layers dense."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **TINY
        | {"num_hidden_layers": layers, "first_k_dense_replace": layers, "eos_token_id": 0}
        | differs
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


class Absorbing(nn.Module):
    """The attention of each layer of a stock model, over a latent cache."""

    def __init__(self, stock: nn.Module, scheme: str | None, fp8_cache: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(
            Absorbed(layer.self_attn, scheme, fp8_cache) for layer in stock.model.layers
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def absorbed(
    layers: int, scheme: str | None, fp8_cache: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Any:
    model = Absorbing(deepseek(layers, dtype), scheme, fp8_cache).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (torch.randn(6, width, generator=generator).to(dtype) for width in (64, 8, 8))
    return model, x, cos, sin


@pytest.fixture
def bound() -> Iterator[None]:
    """Latent attention gets a paged cache, as a pass before the chains."""
    with register_pass(BIND_LATENT, before="mla_rope_kv_write"):
        yield


# ---- the product of keys and values: GEMM + split + cat


@pytest.mark.parametrize(
    ("layers", "scheme", "counted", "dynamic"),
    [
        pytest.param(1, "fp8", "fp8", False, marks=pytest.mark.slow),
        (2, "fp8_per_token", "fp8", False),
        pytest.param(2, "fp8_per_token", "fp8", True, marks=pytest.mark.slow),
        pytest.param(1, "fp8_block", "fp8_block", False, marks=pytest.mark.slow),
        pytest.param(1, "fp8_block", "fp8_block", True, marks=pytest.mark.slow),
        pytest.param(1, "mxfp4", "mxfp4", False, marks=pytest.mark.slow),
    ],
)
def test_each_layer_of_a_quantized_stock_model_makes_keys_and_values_in_one_op(
    layers: int, scheme: str, counted: str, dynamic: bool
) -> None:
    model = atomc.quantize(deepseek(layers, kv_lora_rank=64), scheme)
    report = atomc.explain(model, dynamic=dynamic, options=STRICT)
    assert (
        report.matches["linear_split_cat"]
        == report.matches[f"linear_split_cat[{counted}]"]
        == layers
    )
    assert report.num_ops["linear_split_cat"] == layers and report.bugs == []


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("scheme", "dtype"), [("fp8", torch.float32), ("mxfp4", torch.bfloat16)], ids=["fp8", "mxfp4"]
)
def test_the_stock_model_computes_what_it_did(scheme: str, dtype: torch.dtype) -> None:
    model = atomc.quantize(deepseek(1, dtype, kv_lora_rank=64), scheme)
    ids = torch.arange(7)[None]
    compiled = torch.compile(model, backend="atom", options=STRICT)
    with torch.inference_mode():
        actual, expected = (f(input_ids=ids, use_cache=False).logits for f in (compiled, model))
    assert (actual - expected).abs().max() <= 1e-2 * expected.abs().max()
    matches = atomc.reports()[-1].matches
    assert matches["linear_split_cat"] == matches[f"linear_split_cat[{scheme}]"] == 1


def test_unquantized_it_stays_and_the_report_names_what_is_missing() -> None:
    report = atomc.explain(deepseek(1), options=STRICT)
    assert not report.matches["linear_split_cat"] and "linear_split_cat" not in [
        miss.rewrite for miss in report.near
    ]
    assert "the graph has no linear_mxfp4 and no scaled_linear_fp8" in report.why(
        "linear_split_cat"
    )


NAMED = {p.name: p for p in PIPELINE}
X, PE = torch.randn(5, 64).bfloat16(), torch.randn(5, 1, 8).bfloat16()
WEIGHT = (torch.randn(3 * 20, 64) * 20).to(torch.float8_e4m3fn)


def codes_multiplied(codes: torch.dtype) -> Any:
    def function(x: Tensor, weight: Tensor, scale: Tensor, k_pe: Tensor) -> Any:
        quantized, scales = ops.quant_fp8_per_token(x, codes)
        both = ops.scaled_linear_fp8(quantized, weight, scales, scale, out_dtype=x.dtype).view(
            5, 3, 20
        )
        return torch.cat((both[..., :12], k_pe.expand(5, 3, 8)), -1), both[..., 12:] * 1.5

    return function


def test_heads_may_come_after_tokens_as_well() -> None:
    chosen = [NAMED["tidy"], NAMED["linear_split_cat"]]
    text = rewritten(chosen, codes_multiplied(FP8[0]), X, WEIGHT, torch.tensor([0.01]), PE)
    assert (
        "= linear_split_cat(%0.0, weight, %0.1, scale, %1, nope=12, scheme='fp8', "
        "out_dtype=bfloat16)" in text
    )


@pytest.mark.parametrize("codes", FP8, ids=str)
def test_activations_and_weight_may_be_in_either_fp8(codes: torch.dtype) -> None:
    report = explained(
        codes_multiplied(codes), X, WEIGHT.float().to(codes), torch.tensor([0.01]), PE
    )
    assert report.matches["linear_split_cat[fp8]"] == 1


def test_a_weight_in_another_fp8_than_the_activations_is_a_near_miss() -> None:
    report = explained(codes_multiplied(FP8[1]), X, WEIGHT, torch.tensor([0.01]), PE)
    [miss] = report.misses("linear_split_cat")
    assert (miss.kind, miss.expected, miss.found) == (
        "dtype",
        "`weight` in float8_e4m3fnuz",
        "float8_e4m3fn",
    )


def test_a_tensor_that_is_filled_slice_by_slice_is_a_cat() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        both = a.new_empty(3, 10)
        both[:, 4:].copy_(b)
        both[:, :4].copy_(a)
        return both * 2

    only = [NAMED["tidy"], NAMED["cat_of_slices"]]
    text = rewritten(only, function, torch.randn(3, 4), torch.randn(3, 6))
    assert text.splitlines()[0] == "%0 = cat([a, b], -1)"

    def with_a_gap(a: Tensor, b: Tensor) -> Tensor:
        both = a.new_zeros(3, 11)
        both[:, 4:10].copy_(b)
        both[:, :4].copy_(a)
        return both

    rewritten(only, with_a_gap, torch.randn(3, 4), torch.randn(3, 6), matches=0)


# ---- rotation and write into the latent cache, and the product before them


@pytest.mark.parametrize(
    ("layers", "fp8_cache"),
    [(1, False), (2, True), pytest.param(4, False, marks=pytest.mark.slow)],
)
def test_each_layer_writes_its_latent_in_one_op(layers: int, fp8_cache: bool, bound: None) -> None:
    report = explained(*absorbed(layers, None, fp8_cache), tolerance=0.05 if fp8_cache else 0.0)
    assert report.matches["mla_rope_kv_write"] == report.num_ops["mla_rope_kv_write"] == layers
    assert report.matches["mla_rope_kv_write[fp8]"] == fp8_cache * layers
    assert {"rope", "mla_kv_write"}.isdisjoint(report.num_ops)
    assert [site.layer for site in report.sites if site.rewrite == "mla_rope_kv_write"] == list(
        range(layers)
    )


@pytest.mark.parametrize(
    ("scheme", "fp8_cache", "dtype"),
    [
        ("fp8", False, torch.bfloat16),
        ("fp8", True, torch.float16),
        ("mxfp4", False, torch.float32),
        ("mxfp4", True, torch.bfloat16),
    ],
    ids=str,
)
def test_the_product_to_the_latent_space_joins_it(
    scheme: str, fp8_cache: bool, dtype: torch.dtype, bound: None
) -> None:
    report = explained(
        *absorbed(1, scheme, fp8_cache, dtype), tolerance=0.05 if fp8_cache else 1e-6
    )
    assert (
        report.matches["bmm_rope_kv_write"] == report.matches[f"bmm_rope_kv_write[{scheme}]"] == 1
    )
    assert report.num_ops["bmm_rope_kv_write"] == 1
    assert {"scaled_bmm_fp8", "bmm_mxfp4", "quant_fp8_group", "quant_mxfp4"}.isdisjoint(
        report.num_ops
    )


def test_any_number_of_tokens(bound: None) -> None:
    assert explained(*absorbed(1, "fp8"), dynamic=True).matches["bmm_rope_kv_write[fp8]"] == 1


def test_groups_of_another_size_stay_apart(bound: None) -> None:
    model, *inputs = absorbed(1, "fp8")
    layer = model.layers[0]

    def to_latent(q: Tensor) -> Tensor:
        codes, scales = ops.quant_fp8_group(q, 16)
        return ops.scaled_bmm_fp8(
            codes, layer.weight, scales, layer.weight_scale, out_dtype=q.dtype, group=16
        )

    layer.to_latent = to_latent
    report = explained(model, *inputs)
    assert report.matches["mla_rope_kv_write"] == 1 and not report.matches["bmm_rope_kv_write"]
    [miss] = report.misses("bmm_rope_kv_write")
    assert (miss.kind, miss.found) == ("attribute", "group=16")


# ---- what others pay


@pytest.mark.parametrize("scheme", [pytest.param(None, marks=pytest.mark.slow), "fp8"])
def test_no_pattern_of_latent_attention_is_traced_for_a_model_without_it(
    scheme: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[str] = []
    monkeypatch.setattr(
        Rewrite,
        "traced",
        lambda self, case, own=Rewrite.traced: traced.append(self.name) or own(self, case),
    )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    model = create_model(config, torch.bfloat16, "cpu").eval().requires_grad_(False)
    if scheme is not None:
        model = atomc.quantize(model, scheme)
    report = program.compile_model(copy.deepcopy(model), options=STRICT).report
    assert report.treated and "rope_kv_write" in traced
    assert set(LATENT).isdisjoint(traced)
