"""Latent attention with a quantized kv_b_proj: the runtime caches the latent, whatever the scheme.

H heads, P and V what is not rotated of a key and a value, L width of the latent, R rotated width.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_mla_attention import paged_logits
from test_mla_models import FP8_BLOCK, hub_checkpoint, prompts_of, served
from test_mla_recognition import UNCACHED, per_change, stock
from tiny_experts import sqnr
from tiny_mtp import CONFIG, tensors_of, tiny_model, write
from torch import Tensor, nn

import atomc
from atomc import models, ops
from atomc.loading.loader import load
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import compile_for, plan_step
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.quantization import ONLINE
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

H, P, V, L, R = 4, 32, 16, 64, 8
# Multiples of 32, the group of int4 and MXFP4.
SIZES = {
    "q_lora_rank": 32,
    "kv_lora_rank": L,
    "qk_nope_head_dim": P,
    "qk_rope_head_dim": R,
    "v_head_dim": V,
}
SCHEMES = ("fp8", "fp8_per_token", "fp8_block", "int8", "int4", "mxfp4", "mxfp4_a16")
# How the product of queries and keys' half runs, where it is not in the model's dtype.
PRODUCTS = {"fp8": "fp8", "fp8_per_token": "fp8", "fp8_block": "fp8", "mxfp4": "mxfp4"}
STORED = {"fp8_per_token": "fp8", "mxfp4_a16": "mxfp4"}
# All but kv_b_proj: then a reference in fp32 has no other codes, which rounding could move.
REST = ("re:.*(q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|o_proj|gate_proj|up_proj|down_proj)",)
IDS = torch.arange(40) * 7 % 93 + 3


def model_of(
    scheme: str,
    layers: int = 1,
    ignore: tuple[str, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    model = stock("deepseek_v3", layers, **SIZES).to(dtype)
    return wrap_stock(atomc.quantize(model, scheme, ignore=ignore))


def dequantized(model: nn.Module) -> nn.Module:
    """A copy with kv_b_proj in the model's dtype."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, QuantizedLinear) and path.endswith("kv_b_proj"):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
            model.set_submodule(path, plain)
    return model


def counts(program: Program) -> dict[str, Counter[str]]:
    """Ops by range of token counts."""
    found: dict[str, Counter[str]] = {}
    for choice in program.report.kernels:
        found.setdefault(choice.tokens, Counter())[choice.op] += 1
    return found


# Recognition


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("scheme", "name", "whose", "layers"),
    [
        per_change(
            scheme,
            name,
            whose,
            layers,
            now=(scheme, name, whose, layers)
            in {
                ("mxfp4_a16", "deepseek_v3", "stock", 1),
                ("fp8_block", "deepseek_v3", "ours", 2),
                ("int8", "glm4_moe_lite", "stock", 1),
                ("int4", "deepseek_v3, no q_lora", "ours", 1),
            },
        )
        for scheme in SCHEMES
        for name in ("deepseek_v2", "deepseek_v3", "deepseek_v3, no q_lora", "glm4_moe_lite")
        for whose in ("ours", "stock")
        for layers in (1, 2, 4)
    ],
)
def test_each_layer_caches_its_latent_whatever_the_scheme_of_kv_b_proj(
    scheme: str, name: str, whose: str, layers: int, tmp_path: Path
) -> None:
    differs = SIZES | ({"q_lora_rank": None} if "no q_lora" in name else {})
    model = stock(name, layers, **differs)
    if whose == "ours":
        model.save_pretrained(tmp_path)
        model = load(tmp_path, quantization=scheme, progress=False)
    else:
        model = wrap_stock(atomc.quantize(model, scheme))
    report = (program := compile_model(model, UNCACHED)).report
    assert report.matches["mla_attention"] == layers
    assert report.matches[f"mla_attention[{STORED.get(scheme, scheme)}]"] == layers
    assert report.matches["mla_rope_kv_write"] == report.num_ops["mla_rope_kv_write"] == layers
    assert report.num_ops["mla_paged_attention"] == report.num_ops["kv_b_weight"] == layers
    assert {"attention", "paged_attention", "rope", "kv_write"}.isdisjoint(report.num_ops)
    assert [(spec.kind, spec.tensors[0].shape) for spec in program.specs] == [
        ("latent", (L + R,))
    ] * layers


def test_activations_with_a_static_scale_and_int4_with_zeros_are_recognized_too() -> None:
    static, zeros = model_of("fp8"), model_of("int4", ignore=REST)
    for model, parameter, value in (
        (static, "input_scale", torch.full((1,), 0.02)),
        (zeros, "zeros", torch.full((H * (P + V), L // 32), 7, dtype=torch.uint8)),
    ):
        for layer in model.modules():
            if isinstance(layer, QuantizedLinear):
                scheme = layer.method.scheme
                differs = {"zeros": True} if parameter == "zeros" else {"activation": "static"}
                layer.method = type(layer.method)(type(scheme)(**{**vars(scheme), **differs}))
                layer.set(parameter, value)
        program = compile_model(model, UNCACHED)
        assert program.report.matches["mla_attention"] == 1
        expected = dequantized(model)
        found = paged_logits(program, IDS, (40,))
        assert sqnr(paged_logits(compile_model(expected, UNCACHED), IDS, (40,)), found) > 40


@pytest.mark.rotating
def test_without_state_the_model_keeps_its_quantized_product() -> None:
    model = atomc.quantize(stock("deepseek_v3", 1, **SIZES), "fp8_block")
    report = atomc.explain(model, options=UNCACHED)
    assert report.matches["linear_split_cat[fp8_block]"] == 1
    assert not report.matches["mla_attention"] and "kv_b_weight" not in report.num_ops
    assert "mla_attention" not in [miss.rewrite for miss in report.near]


# Numbers


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("scheme", "chunks"),
    [
        per_change(scheme, chunks, now=chunks != (40,) and scheme == "fp8_block")
        for scheme in SCHEMES
        for chunks in ((40,), (25, 14, 1))
    ],
    ids=str,
)
def test_logits_are_those_of_the_dequantized_weight(scheme: str, chunks: tuple[int, ...]) -> None:
    model = model_of(scheme, 2, ignore=REST)
    program = compile_model(model, UNCACHED)
    assert program.report.matches["mla_attention"] == 2
    with torch.no_grad():
        expected = dequantized(model)(IDS, torch.arange(40))
    torch.testing.assert_close(paged_logits(program, IDS, chunks), expected, rtol=1e-4, atol=1e-4)


@contextmanager
def kernel_of(op: Any, **how: Any) -> Iterator[None]:
    """A kernel of this op that waits for no device, for one test."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.reference(*args, **kwargs)

    op.kernel("fused", **how)(kernel)
    try:
        yield
    finally:
        op.kernels[:] = [each for each in op.kernels if each.provider != "fused"]


# Decibels of the logits: the error of the product of queries, and the weight quantized again.
@pytest.mark.parametrize(
    ("scheme", "least"),
    [
        ("fp8", 25),
        per_change("fp8_per_token", 25, now=False),
        per_change("fp8_block", 25, now=False),
        ("mxfp4", 10),
    ],
)
@pytest.mark.parametrize("written", [True, False], ids=["first", "last"])
def test_with_a_kernel_a_product_is_in_the_format_of_the_models_activations(
    scheme: str, least: float, written: bool
) -> None:
    model = model_of(scheme, 2, ignore=REST)
    write = kernel_of(ops.bmm_rope_kv_write, layout="paged")
    with write if written else kernel_of(ops.quantized_linear_by_head):
        program = compile_model(model, UNCACHED, owned=True)
        assert program.report.matches["bmm_rope_kv_write"] == 2 * written
        assert program.report.matches[f"bmm_rope_kv_write[{PRODUCTS[scheme]}]"] == 2 * written
        # In a step without prompts: that of queries, too, unless it is a part of the write.
        products = {
            ops_of_range["quantized_linear_by_head"] for ops_of_range in counts(program).values()
        }
        assert max(products) == (0 if written else 4)
        found = paged_logits(program, IDS, (25, 14, 1))
    with torch.no_grad():
        expected = dequantized(model_of(scheme, 2, ignore=REST))(IDS, torch.arange(40))
    assert least - (0 if written else 3) < sqnr(expected, found) < 60  # of one product, or of both


@pytest.mark.parametrize(("scheme", "least"), [("fp8_block", 25), ("mxfp4", 10)])
def test_with_a_kernel_keys_and_values_are_products_of_the_stored_weight(
    scheme: str, least: float
) -> None:
    model = model_of(scheme, 2, ignore=REST)
    dense = kernel_of(ops.mla_paged_attention, layout="paged")
    with dense, kernel_of(ops.quantized_mla_paged_attention, layout="paged"):
        program = compile_model(model, UNCACHED, owned=True)
        ops_by_range = counts(program)
        assert max(few["quantized_mla_paged_attention"] for few in ops_by_range.values()) == 2
        logits = paged_logits(program, IDS, (25, 14, 1))
        off = UNCACHED | {"passes": {"linear_split_cat": False}}
        ops_without = counts(compile_model(model_of(scheme, 1, ignore=REST), off, owned=True))
    assert not any(few["quantized_mla_paged_attention"] for few in ops_without.values())
    with torch.no_grad():
        expected = dequantized(model_of(scheme, 2, ignore=REST))(IDS, torch.arange(40))
    assert least < sqnr(expected, logits) < 60


def test_with_aiter_no_weight_of_deepseeks_sizes_is_dequantized() -> None:
    heads, wide = 16, {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    wide["qk_rope_head_dim"] = 64
    sizes = SIZES | wide | {"num_attention_heads": heads, "num_key_value_heads": heads}
    model = wrap_stock(atomc.quantize(stock("deepseek_v3", 1, **sizes), "fp8_block"))
    program = compile_model(
        model.bfloat16().to("meta"), UNCACHED, platform=Platform.named("gfx950"), owned=True
    )
    attention = ("mla_", "kv_b_", "quantized_", "bmm_")
    served = {
        each.op: each.chosen for each in program.report.kernels if each.op.startswith(attention)
    }
    assert served == {
        "kv_b_half": "torch",  # prepared once, beside the tiles of the same weight
        "bmm_rope_kv_write": "aiter",
        "mla_absorbed_attention": "aiter",
        "quantized_linear_by_head": "aiter",
        "mla_rope_kv_write": "aiter",
        "quantized_mla_paged_attention": "aiter",
    }


@pytest.mark.rotating
def test_a_latent_cache_in_fp8_has_an_sqnr_of_30_decibels_and_its_logits_of_20(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("fp8_block", 2, ignore=REST)
    exact, rounded = (
        compile_model(model, UNCACHED | {"kv_cache_dtype": dtype}) for dtype in ("auto", "fp8")
    )
    caches: list[Tensor] = []
    for program in (exact, rounded):
        bind = program.bind

        def bound(states: Any, bind: Any = bind) -> None:
            caches.append(states[0]["kv_cache"])
            bind(states)

        monkeypatch.setattr(program, "bind", bound)
    logits = [paged_logits(program, IDS, (25, 14, 1)) for program in (exact, rounded)]
    # 16 tokens in each of three blocks, the first in the last one.
    rows = [cache.float().flip(0).flatten(0, 1)[:40] for cache in caches]
    assert caches[1].dtype == torch.float8_e4m3fn
    assert 30 < sqnr(*rows) < 40 and 20 < sqnr(*logits) < 60


def test_the_cache_keeps_how_the_weights_are_prepared(tmp_path: Path) -> None:
    options = UNCACHED | {"cache": True, "cache_dir": str(tmp_path)}
    found = []
    for _ in range(2):
        program = compile_model(model_of("fp8_block", ignore=REST), options, owned=True)
        found.append((program.report.cache, paged_logits(program, IDS, (25, 14, 1))))
    assert [cache == "hit" for cache, _ in found] == [False, True]
    assert torch.equal(found[0][1], found[1][1])


# Where a kernel multiplies and writes at once


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("scheme", "platform", "layers"),
    [
        per_change(
            scheme,
            platform,
            layers,
            now=(scheme, platform, layers)
            in {
                ("fp8", "h200", 1),
                ("mxfp4", "gfx950", 2),
            },
        )
        for scheme in SCHEMES
        for platform in ("h200", "gfx942", "gfx950")
        for layers in (1, 2, 4)
    ],
)
def test_on_a_gpu_each_layer_multiplies_queries_in_eight_or_four_bits_and_writes_at_once(
    scheme: str, platform: str, layers: int
) -> None:
    model = model_of(scheme, layers, dtype=torch.bfloat16).to("meta")
    program = compile_model(model, UNCACHED, platform=Platform.named(platform), owned=True)
    report, of_range = program.report, counts(program)
    fused = layers if scheme in PRODUCTS else 0
    # AITER has a product of values, on gfx942 in fp8 alone.
    by_aiter = 0 if platform == "h200" else fused
    if platform == "gfx942" and PRODUCTS.get(scheme) == "mxfp4":
        by_aiter = 0
    # Counted once, whatever the number of ranges.
    assert report.matches["bmm_rope_kv_write"] == fused
    assert report.matches[f"bmm_rope_kv_write[{PRODUCTS.get(scheme)}]"] == fused
    near = {miss.rewrite for miss in report.near}
    assert near.isdisjoint({"mla_attention", "mla_rope_kv_write", "bmm_rope_kv_write"})
    assert report.bugs == []
    for tokens, found in of_range.items():
        few = tokens != "257 and more"
        assert found["bmm_rope_kv_write"] == fused * few
        assert found["mla_rope_kv_write"] == layers - fused * few
        assert found["quantized_linear_by_head"] == by_aiter * few
        assert found["linear_by_head"] == (2 * layers - fused - by_aiter) * few
        assert found["mla_absorbed_attention"] == layers * few
        assert found["mla_paged_attention"] == layers * (not few)
        assert not {"scaled_bmm_fp8", "bmm_mxfp4", "rope"} & set(found)
    assert "257 and more" in of_range and len(of_range) > 1


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_the_product_in_eight_bits_goes_with_a_cache_in_16_and_in_eight_bits(cache: str) -> None:
    model = model_of("fp8_block", 1, dtype=torch.bfloat16).to("meta")
    options = UNCACHED | {"kv_cache_dtype": cache}
    program = compile_model(model, options, platform=Platform.named("h200"), owned=True)
    assert program.report.matches["bmm_rope_kv_write"] == 1


@pytest.mark.rotating
@pytest.mark.parametrize("off", [per_change(False, now=False), ["*layers.0*"]], ids=str)
def test_the_product_in_eight_bits_can_be_turned_off(off: bool | list[str]) -> None:
    model = model_of("fp8_block", 2, dtype=torch.bfloat16).to("meta")
    options = UNCACHED | {"passes": {"bmm_rope_kv_write": off}}
    program = compile_model(model, options, platform=Platform.named("h200"), owned=True)
    left = 0 if off is False else 1
    assert program.report.matches["bmm_rope_kv_write"] == left
    for tokens, found in counts(program).items():
        if tokens != "257 and more":
            assert found["linear_by_head"] == 4 - left and "scaled_bmm_fp8" not in found


@pytest.mark.rotating
def test_heads_that_mxfp4_cannot_group_are_multiplied_in_16_bits() -> None:
    narrow = SIZES | {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8}
    model = wrap_stock(atomc.quantize(stock("deepseek_v3", 1, **narrow), "mxfp4"))
    report = compile_model(
        model.bfloat16().to("meta"), UNCACHED, platform=Platform.named("h200"), owned=True
    ).report
    assert report.matches["mla_attention"] == 1 and not report.matches["bmm_rope_kv_write"]


# Memory


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4"])
def test_the_runtime_holds_kv_b_proj_in_the_forms_that_attention_reads_and_frees_the_stored_one(
    scheme: str,
) -> None:
    model = model_of(scheme, 2, ignore=REST)
    stored = [
        layer.weight.nbytes for layer in model.modules() if isinstance(layer, QuantizedLinear)
    ]
    with kernel_of(ops.bmm_rope_kv_write, layout="paged"):
        program = compile_model(model, UNCACHED | {"providers": ("fused", "torch")}, owned=True)
    dense = 4 * H * (P + V) * L
    keys = {"fp8_block": H * L * P + 4, "mxfp4": H * L * (P // 2 + P // 32)}[scheme]
    assert len(stored) == 2 and program.prepared_bytes == 2 * (dense + keys)
    assert program.replaced_bytes == sum(stored)
    assert f"take {program.prepared_bytes / 2**20:.1f} MiB" in " ".join(program.report.notes)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            assert layer.weight.is_meta


def test_a_plan_counts_these_forms(tmp_path: Path) -> None:
    heads, wide = 16, {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    sizes = SIZES | wide | {"num_attention_heads": heads, "num_key_value_heads": heads}
    config = stock("deepseek_v3", 2, **sizes).config
    config.architectures, config.dtype = ["DeepseekV3ForCausalLM"], "bfloat16"
    config.save_pretrained(tmp_path)
    platform = Platform.named("h200")
    model = build_model(tmp_path, quantization="fp8_block", platform=platform)
    program = compile_for(model, platform)
    assert {spec.kind for spec in program.specs} == {"latent"}
    prepared = [choice for choice in program.report.kernels if choice.op.startswith("kv_b_")]
    assert prepared and all((each.chosen, each.refused) == ("torch", []) for each in prepared)
    memory = plan_step(model, platform, Workload(1, 1, 16), program=program).memory
    stored = heads * (128 + 128) * 512
    forms = 2 * stored + heads * 512 * 128 + 4  # in 16 bits, and the half for keys in 8
    assert memory.copies == 2 * (forms - stored)


# Served


@pytest.mark.parametrize(
    ("whose", "settings"),
    [
        ("stock", {"max_num_batched_tokens": 7}),
        per_change("ours", {"max_num_batched_tokens": 7}, now=False),
        per_change("ours", {"enable_prefix_caching": False}, now=False),
        per_change("ours", {"options": {"strict": True, "kv_cache_dtype": "fp8"}}, now=False),
    ],
    ids=str,
)
def test_an_fp8_checkpoint_is_served_from_the_latent_cache(
    whose: str, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_checkpoint(tmp_path)
    if whose == "stock":
        monkeypatch.setattr(models, "REGISTRY", {})
    model, prompts = load(tmp_path, progress=False), prompts_of(5, 24, common=35)
    reference = dequantized(model)
    made, num_cached = served(model, prompts, 6, **settings)
    shared = settings.get("enable_prefix_caching", True)
    assert num_cached == (4 * 32 if shared else 0)
    exact = "options" not in settings
    for prompt, tokens in zip(prompts, made, strict=True):
        ids = torch.tensor(prompt + tokens)
        with torch.no_grad():
            logits = reference(ids, torch.arange(len(ids)))[len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        # Codes of activations that rounding moves decide between equal logits.
        assert (best - chosen).max() < (0.02 if exact else 0.5) * logits.std()


def drafting_checkpoint(path: Path) -> Path:
    """A DeepSeek-V3 with a draft layer that computes, in fp8 in blocks of 128."""
    latent: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": CONFIG["num_attention_heads"],
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        **SIZES,
    }
    stored = {}
    for name, weight in tensors_of(tiny_model(**latent).float()).items():
        if weight.dim() != 2 or any(kept in name for kept in ("embed", "head", "mlp.gate.")):
            stored[name] = weight
        else:
            [made] = ONLINE["fp8_block"].quantize([weight])
            stored |= {name: made["weight"], f"{name}_scale_inv": made["weight_scale"]}
    return write(path, stored, **latent, quantization_config=FP8_BLOCK, dtype="float32")


@pytest.mark.slow
def test_its_draft_layer_caches_latents_and_changes_no_token(tmp_path: Path) -> None:
    path, prompts = drafting_checkpoint(tmp_path / "model"), prompts_of(4, 24)
    found = []
    for settings in ({}, {"speculative": "mtp", "speculative_tokens": 2}):
        llm = LLM(
            str(path),
            options=UNCACHED,
            progress=False,
            device="cpu",
            max_num_seqs=4,
            max_model_len=64,
            max_num_batched_tokens=13,
            **settings,
        )
        made = llm.generate(prompts, SamplingParams(max_tokens=8))
        found.append([list(each.token_ids) for each in made])
        worker = llm.engine.executor
        draft = () if not settings else worker.programs.draft.specs
        assert {spec.kind for spec in (*worker.program.specs, *draft)} == {"latent"}
        assert bool(draft) == bool(settings)
    assert found[0] == found[1]
