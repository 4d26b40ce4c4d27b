"""The indexer of sparse attention: the op, DeepSeek-V3.2's classes, and what attention reads when
they are served.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASES
from kernel_cases.draw import Draw
from latent_blockers import EXPANDED, H, P, R, T, V
from rewriting import explained
from test_mla_attention import paged_logits
from test_mla_models import WIDE as WIDE_LATENT
from test_mla_models import generated, hub_checkpoint, prompts_of, served
from test_models import IDS, TINY, hf_logits
from test_moe_models import EAGER, KINDS, POSITIONS, theirs, theirs_of
from tiny_experts import sqnr
from torch import Tensor, nn
from torch.testing import assert_close

from atomc import models, ops
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.execution.self_check import own_attention
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

UNCACHED = {**EAGER, "cache": False}
TOPK = KINDS["deepseek_v32"][1]["index_topk"]
WIDE = KINDS["deepseek_v32"][1] | {"index_topk": 96}
ONE_LAYER = {"num_hidden_layers": 1}
NEAR = {"atol": 1e-4, "rtol": 1e-4}


def by_hand(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> list[list[int]]:
    """One query at a time."""
    rows = []
    for t in range(len(q)):
        scores = [float(weights[t] @ (q[t] @ k[s]).relu()) for s in range(t + 1)]
        best = sorted(range(t + 1), key=lambda s: (-scores[s], s))[:topk]
        rows.append(sorted(best) + [-1] * (topk - len(best)))
    return rows


@pytest.mark.parametrize("case", ["several tokens", "one token", "fewer keys than chosen"])
def test_the_indexer_chooses_the_keys_with_the_largest_scores_and_of_equal_ones_the_first(
    case: str,
) -> None:
    a = CASES["index_topk"][case](Draw(torch.float32))
    assert ops.index_topk(**a).tolist() == by_hand(**a)


def test_a_mask_of_chosen_keys_shows_these_and_no_others() -> None:
    chosen = torch.tensor([[0, -1], [1, -1], [0, 2]], dtype=torch.int32)
    assert ops.chosen_mask(chosen).tolist() == [
        [[True, False, False], [False, True, False], [True, False, True]]
    ]


def stock_choices(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """The positions [T, K] that the indexers of a transformers model choose, by layer."""
    found: list[Tensor] = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda *given: found.append(given[-1][0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v32, short"])
def test_our_indexer_chooses_the_keys_that_that_of_transformers_does(
    name: str, tmp_path: Path
) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    ours, found = load(tmp_path), []
    for layer in ours.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda *given: found.append(given[-1]))
    with torch.no_grad():
        ours(IDS, POSITIONS)
    expected = stock_choices(model, IDS)
    assert len(found) == len(expected) == 2
    for chosen, of_stock in zip(found, expected, strict=True):
        for t, (row, theirs_row) in enumerate(zip(chosen.tolist(), of_stock.tolist(), strict=True)):
            # It chooses hidden keys where there are not enough others.
            assert {s for s in row if s >= 0} == {s for s in theirs_row if s <= t}
    few = min(TOPK if name == "deepseek_v32" else len(IDS), len(IDS))
    assert (found[0][-1] >= 0).sum() == few


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("whose", "layers"),
    [
        # Of ours, the test of what a served model reads has a program.
        pytest.param("ours", 1, marks=pytest.mark.slow),
        pytest.param("ours", 2, marks=pytest.mark.slow),
        ("stock", 2),
    ],
)
def test_in_the_runtime_each_layer_caches_its_latent_and_the_key_of_its_indexer(
    whose: str, layers: int, tmp_path: Path
) -> None:
    kind, config = KINDS["deepseek_v32"]
    model = theirs_of(kind, **config | {"num_hidden_layers": layers})
    if whose == "ours":
        model.save_pretrained(tmp_path)
        model = load(tmp_path)
    else:
        model = wrap_stock(model)
    check_layers(compile_model(model, UNCACHED), layers)


def check_layers(program: Program, layers: int) -> None:
    """Assert that each layer has a latent and a key of its indexer in the cache, and no other state."""
    report = program.report
    assert report.matches["mla_attention"] == layers
    for op in ("mla_rope_kv_write", "mla_paged_attention", "index_write", "paged_index_topk"):
        assert report.num_ops[op] == layers, op
    assert {"attention", "chosen_mask", "index_topk"}.isdisjoint(report.num_ops)
    absorbed = Counter(
        choice.tokens for choice in report.kernels if choice.op == "mla_absorbed_attention"
    )
    assert set(absorbed.values()) == {layers}
    assert sorted((spec.kind, spec.tensors[0].shape) for spec in program.specs) == sorted(
        [("latent", (24,)), ("indexer", (20,))] * layers
    )
    assert {spec.group for spec in program.specs} == {0}


CHUNKS = {"max_num_batched_tokens": 7}


SERVED = [
    (whose, name, settings)
    for whose in ("ours", "stock")
    for name in ("deepseek_v32", "deepseek_v32, short")
    for settings in (CHUNKS, {"enable_prefix_caching": False})
]
# Of ours, the next test serves one.
FAST = [("stock", "deepseek_v32", CHUNKS)]


@pytest.mark.rotating
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    ("whose", "name", "settings"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in SERVED],
    ids=str,
)
def test_chunks_ragged_batches_and_a_shared_prefix_give_the_text_that_transformers_generates(
    whose: str, name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, prompts = theirs(name), prompts_of(6, 24, common=35)
    expected = generated(model, prompts, 12)
    if whose == "ours":
        model.save_pretrained(tmp_path)
        model = load(tmp_path)
    made, num_cached = served(model, prompts, 12, **settings)
    assert made == expected
    assert num_cached == (5 * 32 if settings == CHUNKS else 0)


@pytest.mark.rotating
def test_a_served_model_reads_the_chosen_keys_only_where_there_are_more(tmp_path: Path) -> None:
    model = theirs("deepseek_v32")
    model.save_pretrained(tmp_path)
    prompts = prompts_of(4, 24, common=20)
    sparse, _ = served(load(tmp_path), prompts, 8)
    assert sparse == generated(model, prompts, 8)
    dense = generated(theirs_of("deepseek_v32", **WIDE), prompts, 8)
    assert all(one != other for one, other in zip(sparse, dense, strict=True))

    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"index_topk": 96}))
    program = compile_model(load(tmp_path), UNCACHED)
    check_layers(program, model.config.num_hidden_layers)
    ids = torch.arange(3, 33)
    exact = paged_logits(program, ids, (9, 20, 1))
    assert_close(exact, hf_logits(theirs_of("deepseek_v32", **WIDE), ids, torch.arange(30)), **NEAR)
    model.config.index_topk = TOPK
    few = hf_logits(model, ids, torch.arange(30))
    assert_close(few[:TOPK], exact[:TOPK], **NEAR)
    assert ((few - exact)[TOPK + 5 :].abs().amax(-1) > 0.01 * exact.abs().max()).all()


@pytest.mark.rotating
def test_an_fp8_cache_keeps_codes_of_the_keys_and_a_scale_each(tmp_path: Path) -> None:
    kind, config = KINDS["deepseek_v32, short"]
    theirs_of(kind, **config | ONE_LAYER).save_pretrained(tmp_path)
    model, ids = load(tmp_path), torch.arange(3, 43)
    program = compile_model(model, UNCACHED | {"kv_cache_dtype": "fp8"})
    [spec, *_] = [spec for spec in program.specs if spec.kind == "indexer"]
    assert spec.bytes_per_token() == 20 + 4 and not spec.scales
    exact = model(ids, torch.arange(40))
    assert sqnr(exact, paged_logits(program, ids, (25, 14, 1))) > 15


def test_keys_in_fp8_choose_nearly_the_same() -> None:
    draw = Draw(torch.float32)
    q, k, weights = draw.normal(50, 16, 64), draw.normal(50, 64), draw.normal(50, 16)
    table = torch.arange(4, dtype=torch.int32)[None]
    starts, lengths = torch.tensor([0, 50]).int(), torch.tensor([50]).int()
    cache = torch.zeros(4, 16, 68, dtype=torch.float8_e4m3fn)
    token = ops.index_write(k, cache, torch.arange(50))
    found = ops.paged_index_topk(q, weights, cache, starts, lengths, table, token, topk=10)
    exact = ops.index_topk(q, k, weights, topk=10)
    same = sum(
        len(set(a) & set(b)) for a, b in zip(found[10:].tolist(), exact[10:].tolist(), strict=True)
    )
    assert torch.equal(found[:10], exact[:10])
    assert 0.9 < same / (40 * 10) < 1


@pytest.mark.rotating
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_the_weights_of_heads_are_not_quantized_in_a_checkpoint_in_blocks_of_fp8(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_checkpoint(tmp_path, "deepseek_v32, short")
    if stock:
        monkeypatch.setattr(models, "REGISTRY", {})
    model = load(tmp_path, progress=False)
    inner = model.hf_model if stock else model
    indexer = inner.model.layers[1].self_attn.indexer
    assert type(indexer.weights_proj) is nn.Linear
    assert isinstance(indexer.wq_b, QuantizedLinear) and isinstance(indexer.wk, QuantizedLinear)
    plain = theirs_of("deepseek_v32", **KINDS["deepseek_v32, short"][1] | WIDE_LATENT)
    with torch.no_grad():
        assert sqnr(hf_logits(plain, IDS, POSITIONS), model(IDS, POSITIONS)) > 8


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        (
            {"q_lora_rank": None},
            "deepseek_v32: q_lora_rank is null, and the indexer reads the latent of the queries",
        ),
        (
            {"layer_types": ["indexed_attention", "full_attention"]},
            "deepseek_v32: layer_types ['indexed_attention', 'full_attention'] is not supported, "
            "only 'indexed_attention' in each layer",
        ),
        (
            {"index_head_dim": 4},
            "deepseek_v32: index_head_dim 4 is less than qk_rope_head_dim 8",
        ),
        ({"index_topk": 0}, "deepseek_v32: index_topk 0 is not a positive integer"),
        (
            {"rope_interleave": False},
            "deepseek_v32: rope_interleave False is not supported, only True",
        ),
    ],
)
def test_an_unsupported_config_is_refused_in_one_sentence(
    differs: dict[str, object], sentence: str
) -> None:
    config = TINY | KINDS["deepseek_v32"][1] | {"model_type": "deepseek_v32"} | differs
    with pytest.raises(ValueError) as raised:
        create_model(config | {"architectures": ["DeepseekV32ForCausalLM"]}, device="meta")
    assert str(raised.value) == sentence


@pytest.mark.rotating
def test_on_a_gpu_each_step_runs_in_kernels_that_a_graph_can_capture(tmp_path: Path) -> None:
    kind, config = KINDS["deepseek_v32"]
    theirs_of(kind, **config | ONE_LAYER).save_pretrained(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    model = create_model(hf, torch.bfloat16, "meta")
    program = compile_model(model, UNCACHED, platform=Platform.named("h200"))
    chosen = {(choice.op, choice.chosen) for choice in program.report.kernels}
    ours = {op for op, _ in chosen if op.startswith(("mla_", "index_", "paged_"))}
    assert ours == {
        "index_write",
        "paged_index_topk",
        "mla_absorbed_attention",
        "mla_paged_attention",
        "mla_rope_kv_write",
    }
    assert {found for found in chosen if found[0] in ours} == {(op, "triton") for op in ours}


WIDE_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("machine", "options", "quantized", "provider"),
    [
        ("gfx950", {"kv_cache_dtype": "fp8"}, 1, "aiter"),
        pytest.param("gfx942", {"kv_cache_dtype": "fp8"}, 1, "aiter", marks=pytest.mark.slow),
        pytest.param("gfx950", {}, 0, "triton", marks=pytest.mark.slow),
        ("gfx950", {"kv_cache_dtype": "fp8", "passes": {"index_queries": False}}, 0, "triton"),
        ("h200", {"kv_cache_dtype": "fp8"}, 0, "triton"),
    ],
)
def test_queries_are_quantized_for_a_kernel_that_multiplies_codes(
    machine: str, options: dict[str, object], quantized: int, provider: str
) -> None:
    differs = KINDS["deepseek_v32"][1] | WIDE_INDEXER | ONE_LAYER
    config = theirs_of("deepseek_v32", **differs).config.to_dict()
    model = create_model(
        config | {"architectures": ["DeepseekV32ForCausalLM"]}, torch.bfloat16, "meta"
    )
    program = compile_model(model, UNCACHED | options, platform=Platform.named(machine))
    assert program.report.matches["index_queries"] == quantized
    chosen = {c.chosen for c in program.report.kernels if c.op == "paged_index_topk"}
    assert chosen == {provider}


def test_an_indexer_that_chooses_other_keys_is_refused() -> None:
    model = theirs("deepseek_v32")
    indexer = model.model.layers[1].self_attn.indexer

    def of_other_queries(self: nn.Module, x: Tensor, latent: Tensor, *rest: object) -> Tensor:
        return type(indexer).__base__.forward(self, x, latent.flip(-1), *rest)

    indexer.__class__ = type("Other", (type(indexer),), {"forward": of_other_queries})
    with pytest.raises(ValueError) as raised:
        wrap_stock(model)
    assert str(raised.value) == (
        "DeepseekV32ForCausalLM: Other chooses other keys than ops.index_topk"
    )


def test_a_wrapped_model_still_runs_its_own_indexers_with_its_own_attention() -> None:
    model = theirs("deepseek_v32")
    expected = stock_choices(model, IDS)
    wrapped = wrap_stock(model)
    found: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.indexer.register_forward_hook(lambda *given: found.append(given[-1][0]))
    with own_attention(model):
        hf_logits(model, IDS, POSITIONS)
    assert all(map(torch.equal, found, expected))
    wrapped(IDS, POSITIONS)
    # Keys that are hidden are none.
    assert found[2][0].tolist() == [0] + [-1] * (TOPK - 1) and (expected[0][0] >= 0).all()


CHOSEN = torch.tensor([[t // 2, t] if t > 1 else [0, t or -1] for t in range(T)]).int()


def of_chosen_keys(
    change: Callable[[Tensor], Tensor] = lambda mask: mask, read: bool = False, **more: object
) -> Callable[..., Any]:
    """Latent attention over chosen keys as the models write it."""

    def function(
        q: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, weight: Tensor, chosen: Tensor
    ) -> Any:
        both = F.linear(kv_c, weight).view(T, H, P + V)
        k = torch.cat((both[..., :P], k_pe.expand(T, H, R)), -1)
        mask = change(ops.chosen_mask(chosen))
        queries = torch.cat((q, q_pe), -1)
        found = ops.attention(queries, k, both[..., P:], None, mask, scale=0.1, **more)
        return found, *([mask.float()] if read else [])

    return function


NEAR_MISSES = {
    "another mask as well": (
        of_chosen_keys(lambda mask: mask & torch.ones(T, T).tril(-2).bool()),
        "attention.* reading chosen_mask.* found bitwise_and",
    ),
    "a mask of numbers": (
        of_chosen_keys(lambda mask: mask.to(torch.bfloat16)),
        "attention.* reading chosen_mask.* found cast",
    ),
    "another reader of the mask": (
        of_chosen_keys(read=True),
        "no other reader of chosen_mask",
    ),
    "a window": (of_chosen_keys(window=3), "attention with window=0; found window=3"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_attention_with_more_than_chosen_keys_keeps_its_mask_with_a_reason(name: str) -> None:
    function, reason = NEAR_MISSES[name]
    report = explained(function, *EXPANDED, CHOSEN, tolerance=0.02)
    assert not report.matches["mla_attention"]
    assert re.search(reason, report.why("mla_attention")), report.why("mla_attention")


def test_a_mask_of_chosen_keys_becomes_an_operand_of_latent_attention() -> None:
    report = explained(of_chosen_keys(), *EXPANDED, CHOSEN, tolerance=0.02)
    assert report.matches["mla_attention"] == 1 and "chosen_mask" not in report.num_ops
