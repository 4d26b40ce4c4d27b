"""Latent attention as one op: in the stock classes and in our file, and what keeps it from being
recognized.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from latent_blockers import EXPANDED, expanded
from rewriting import explained
from test_moe_models import EAGER, theirs_of
from test_moe_models import LATENT as SIZES
from torch import Tensor, nn

import atomc
from atomc.loading.loader import load
from atomc.program import compile_model
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

DENSE = SIZES | {"first_k_dense_replace": 9, "n_group": 1, "topk_group": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", DENSE),
    "deepseek_v3": ("deepseek_v3", DENSE),
    "deepseek_v3, no q_lora": (
        "deepseek_v3",
        DENSE | {"q_lora_rank": None, "rope_interleave": False},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", SIZES | {"mlp_layer_types": ["dense"] * 4}),
}
IDS = torch.arange(3, 12)[None]
UNCACHED = {**EAGER, "cache": False}


def stock(name: str, layers: int, **differs: object) -> nn.Module:
    model_type, config = KINDS[name]
    config = config | {"num_hidden_layers": layers}
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = ["dense"] * layers
    return theirs_of(model_type, **config | differs)


def per_change(*values: object, now: bool) -> Any:
    return pytest.param(*values, marks=() if now else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "attention", "layers", "dynamic"),
    [
        per_change(
            name,
            attention,
            layers,
            dynamic,
            now=(name, attention, layers, dynamic)
            in {("deepseek_v3", "sdpa", 2, True), ("deepseek_v2", "eager", 1, False)},
        )
        for name in KINDS
        for attention in ("sdpa", "eager")
        for layers in (1, 2, 4)
        for dynamic in (False, True)
    ],
)
def test_each_layer_of_a_stock_model_is_one_op_under_torch_compile(
    name: str, attention: str, layers: int, dynamic: bool
) -> None:
    model = stock(name, layers)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        compiled = torch.compile(model, backend="atom", dynamic=dynamic, options=UNCACHED)
        actual, expected = compiled(input_ids=IDS).logits, model(input_ids=IDS).logits
    report = atomc.reports()[-1]
    assert report.matches["mla_attention"] == report.num_ops["mla_attention"] == layers
    assert "attention" not in report.num_ops
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("attention", "dynamic"),
    [
        ("sdpa", True),
        ("eager", False),
        pytest.param("sdpa", False, marks=pytest.mark.slow),
        pytest.param("eager", True, marks=pytest.mark.slow),
    ],
)
def test_without_a_cache_the_mask_of_one_sequence_is_causal(attention: str, dynamic: bool) -> None:
    model = stock("deepseek_v3", 1)
    model.set_attn_implementation(attention)
    compiled = torch.compile(model, backend="atom", dynamic=dynamic, options=UNCACHED)
    with torch.no_grad():
        actual = compiled(input_ids=IDS, use_cache=False).logits
        expected = model(input_ids=IDS, use_cache=False).logits
    assert atomc.reports()[-1].matches["mla_attention"] == 1
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.rotating
@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])},
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])},
    ],
    ids=["packed sequences", "padding"],
)
def test_without_a_cache_a_mask_of_inputs_stays_with_a_reason(given: dict[str, Tensor]) -> None:
    model = stock("deepseek_v3", 1)
    compiled = torch.compile(model, backend="atom", options=UNCACHED)
    with torch.no_grad():
        actual = compiled(input_ids=IDS, use_cache=False, **given).logits
        expected = model(input_ids=IDS, use_cache=False, **given).logits
    report = atomc.reports()[-1]
    assert not report.matches["mla_attention"] and report.matches["attention"] == 1
    why = "found a mask that is not known to hide exactly the later keys: transformers makes one"
    assert why in report.why("mla_attention")
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "whose", "layers"),
    [
        per_change(
            name,
            whose,
            layers,
            now=(name, whose, layers) in {("deepseek_v3", "stock", 2), ("deepseek_v2", "ours", 1)},
        )
        for name in KINDS
        for whose in ("ours", "stock")
        for layers in (1, 2, 4)
    ],
)
def test_in_the_runtime_each_layer_caches_its_latent(
    name: str, whose: str, layers: int, tmp_path: Path
) -> None:
    model = stock(name, layers)
    if whose == "ours":
        model.save_pretrained(tmp_path)
        model = load(tmp_path)
    else:
        model = wrap_stock(model)
    program = compile_model(model, UNCACHED)
    counts = program.report.num_ops
    assert program.report.matches["mla_attention"] == layers
    assert counts["mla_rope_kv_write"] == counts["mla_paged_attention"] == layers
    assert {"attention", "paged_attention", "rope", "kv_write"}.isdisjoint(counts)
    assert [(spec.kind, spec.tensors[0].shape) for spec in program.specs] == [
        ("latent", (SIZES["kv_lora_rank"] + SIZES["qk_rope_head_dim"],))
    ] * layers


def test_the_scale_is_that_of_the_graph() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 0.5}
    model = stock("deepseek_v3", 1, rope_parameters=rope | {"mscale_all_dim": 2.0})
    report = atomc.explain(model, input_ids=IDS, options=UNCACHED)
    [site] = [site for site in report.sites if site.rewrite == "mla_attention"]
    scaling = model.model.layers[0].self_attn.scaling
    assert site.attrs["scale"] == scaling != 24**-0.5


NEAR = {
    "a rotated key for each head": (expanded(per_head=True), "the graph has no expand"),
    "a bias": (expanded(bias=True), "linear without `bias`"),
    "values of another product": (expanded(other_values=True), "the same view.* here as well"),
    "a mask": (expanded(masked=True), "mask that is not known to hide exactly the later keys"),
    "fewer queries than keys": (expanded(fewer=True), "attention.* reading cat.* found slice"),
    "another reader of the keys": (expanded(read=True), "no other reader of cat.* abs"),
    "a window": (expanded(window=3), "attention with window=0; found window=3"),
}


@pytest.mark.parametrize("name", NEAR)
def test_attention_that_is_not_latent_is_left_alone_with_a_reason(name: str) -> None:
    function, reason = NEAR[name]
    report = explained(function, *EXPANDED, tolerance=0.02)
    assert not report.matches["mla_attention"]
    assert re.search(reason, report.why("mla_attention")), report.why("mla_attention")


def test_without_anything_in_the_way_the_same_attention_is_recognized() -> None:
    assert explained(expanded(), *EXPANDED, tolerance=0.02).matches["mla_attention"] == 1
