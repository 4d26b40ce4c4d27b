"""Routers and experts of stock models, and experts that are written out, become one op each, with
eager's values.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_group import fake_group
from moe_blockers import EXPERTS as WRITTEN_OUT
from moe_blockers import experts as written_out
from rewriting import after_passes, explained, rewritten, since
from torch import Tensor, nn

import atomc
from atomc import ops, passes
from atomc.loading.create_model import create_model
from atomc.passes.recognize.experts import TRANSFORMERS
from atomc.passes.recognize.route import TOPK_ROUTE
from atomc.platform import Platform
from atomc.program import compile_model

transformers = pytest.importorskip("transformers")

HIDDEN, NUM, TOP = 64, 16, 4
TINY = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": NUM,
    "num_local_experts": NUM,
    "n_routed_experts": NUM,
    "moe_num_experts": NUM,
    "num_experts_per_tok": TOP,
    "moe_k": TOP,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 0,
    "moe_layer_start_index": 0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
# Kind -> (what its config adds, arguments of the router besides k).
TOP2 = {"score": "sigmoid", "groups": 4, "topk_groups": 2, "group_score": "top2", "eps": 1e-20}
KINDS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}, {"renormalize": True}),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": False}, {}),
    "olmoe": ("olmoe", {}, {}),
    "mixtral": ("mixtral", {}, {"renormalize": True}),
    "gpt_oss": ("gpt_oss", {}, {"score": "softmax_of_chosen"}),
    "granitemoe": ("granitemoe", {}, {"score": "softmax_of_chosen"}),
    "glm4_moe": ("glm4_moe", {**GROUPS, "routed_scaling_factor": 2.5}, TOP2 | {"scale": 2.5}),
    "one group": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1},
        {"score": "sigmoid", "group_score": "top2", "eps": 1e-20},
    ),
    "deepseek_v3": ("deepseek_v3", {**GROUPS, "routed_scaling_factor": 2.5}, TOP2 | {"scale": 2.5}),
    "deepseek_v2": (
        "deepseek_v2",
        {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        {"groups": 4, "topk_groups": 2, "scale": 16.0},
    ),
    "greedy": ("deepseek_v2", {"routed_scaling_factor": 16.0}, {"scale": 16.0}),
    "minimax_m2": ("minimax_m2", {}, {"score": "sigmoid", "renormalize": True}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_norm_min": 0.3}, {"min_sum": 0.3}),
    "two groups": (
        "glm4_moe",
        {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
        TOP2 | {"groups": 2, "topk_groups": 1, "scale": 2.5},
    ),
}
IMPLEMENTATIONS = ["grouped_mm", "batched_mm"]
DTYPES = [torch.bfloat16, torch.float32]


def stock(
    name: str, implementation: str, dtype: torch.dtype, device: str = "cpu", **differs: object
) -> nn.Module:
    kind, added, _ = KINDS[name]
    config = transformers.AutoConfig.for_model(
        kind, **TINY | {"num_hidden_layers": 1} | added | differs
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager"
        )
    model.set_experts_implementation(implementation)
    return model.eval().requires_grad_(False)


def mixture(name: str, implementation: str, dtype: torch.dtype, **differs: object) -> nn.Module:
    """The layer's mixture of experts, with parameters that choose clearly."""
    model = stock(name, implementation, dtype, **differs)
    found = next(module for module in model.modules() if hasattr(module, "experts"))
    for name, tensor in (*found.named_parameters(), *found.named_buffers()):
        tensor.data = (torch.randn(tensor.shape) / (2 if "bias" in name else 4)).to(tensor.dtype)
    return found


def per_change(*values: object, now: bool) -> Any:
    """A row of parameters; unless `now`, left to `make test-all`."""
    return pytest.param(*values, marks=() if now else pytest.mark.slow)


def rows() -> list[Any]:
    """Each kind in one combination per change, and GPT-OSS in half of them: each implementation with
    and without a known number of tokens.
    """
    combinations = [
        (implementation, dtype, dynamic)
        for implementation in IMPLEMENTATIONS
        for dtype in DTYPES
        for dynamic in (False, True)
    ]
    return [
        per_change(
            name,
            *combination,
            now=(i + j) % len(combinations) == 0 or (name == "gpt_oss" and j % 4 in (0, 3)),
        )
        for i, name in enumerate(KINDS)
        for j, combination in enumerate(combinations)
    ]


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize(("name", "implementation", "dtype", "dynamic"), rows())
def test_a_stock_mixture_is_one_router_and_one_op_for_its_experts(
    name: str, implementation: str, dtype: torch.dtype, dynamic: bool
) -> None:
    layer = mixture(name, implementation, dtype)
    report = explained(
        lambda x: layer(x),
        torch.randn(2, 5, HIDDEN).to(dtype),
        dynamic=dynamic,
        tolerance=1e-5 if dtype == torch.float32 else 2e-2,
    )
    # Some routers have a weight in fp32 also in a model of 16 bits; which, depends on the version.
    router = layer.gate if hasattr(layer, "gate") else layer.router
    in_fp32 = router.weight.dtype != dtype
    assert in_fp32 or name != "ernie4_5_moe" or dtype == torch.float32
    assert [miss.rewrite for miss in report.near] == ["linear_fp32"] * in_fp32
    assert (report.num_ops["topk_route"], report.num_ops["moe_experts"]) == (1, 1)
    route, made = (
        next(site.attrs for site in report.sites if site.rewrite == rewrite)
        for rewrite in ("topk_route", "moe_experts")
    )
    expected = KINDS[name][2]
    assert route["k"] == made["top_k"] == TOP and route["experts"] == made["experts"] == NUM
    for attr in ("score", "groups", "scale", "eps", "min_sum"):
        assert route.get(attr) == (expected | {"score": expected.get("score", "softmax")}).get(attr)
    assert made["activation"] == ("swiglu_oai" if name == "gpt_oss" else "silu")


V3_ROUTER = {
    "n_routed_experts": 256,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
}


def test_the_router_of_deepseek_v3_needs_no_order_and_is_aiters() -> None:
    layer = mixture("deepseek_v3", "grouped_mm", torch.bfloat16, **V3_ROUTER)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.bfloat16)
    report = atomc.explain(layer, x, platform="gfx950")
    assert {c.chosen for c in report.kernels if c.op == "topk_route"} == {"aiter"}


def test_the_router_of_a_served_deepseek_v3_is_aiters() -> None:
    sizes = (
        TINY | V3_ROUTER | {"num_hidden_layers": 1, "num_key_value_heads": 4, "num_experts": 256}
    )
    config = transformers.AutoConfig.for_model("deepseek_v3", **sizes).to_dict()
    model = create_model(
        config | {"architectures": ["DeepseekV3ForCausalLM"]}, torch.bfloat16, "meta"
    )
    program = compile_model(model, {"cache": False}, platform=Platform.named("gfx950"))
    assert {c.chosen for c in program.report.kernels if c.op == "topk_route"} == {"aiter"}


# ---- counts

# Kind -> how its config says that some layers are dense, the number of dense ones of n.
MIXED: dict[str, tuple[dict[str, object], Callable[[int], int]]] = {
    "qwen3_moe": ({"decoder_sparse_step": 2}, lambda n: (n + 1) // 2),
    "mixtral": ({}, lambda n: 0),
    "gpt_oss": ({}, lambda n: 0),
    "glm4_moe": ({"first_k_dense_replace": 1}, lambda n: 1),
}


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "whose", "layers", "dynamic"),
    [
        per_change(
            name,
            whose,
            layers,
            dynamic,
            now=(layers, dynamic) == (2, name == "gpt_oss")
            and (whose == "stock" or name == "glm4_moe"),
        )
        for name in MIXED
        for whose in ("stock", "ours")
        for layers in (1, 2, 4)
        for dynamic in (False, True)
    ],
)
def test_each_sparse_layer_has_one_router_and_one_op_for_its_experts(
    name: str, whose: str, layers: int, dynamic: bool
) -> None:
    differs, dense = MIXED[name]
    # As on a GPU, whose graph of the experts counts them in another dtype. There torch 2.11 cannot
    # trace the mask of transformers 5.17.
    device = "meta" if torch.__version__ >= "2.13" else "cpu"
    model = stock(name, "grouped_mm", torch.bfloat16, device, num_hidden_layers=layers, **differs)
    if whose == "ours":
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        model = create_model(config, torch.bfloat16, device)
    report = atomc.explain(model, dynamic=dynamic, options={"strict": True, "glue": "eager"})
    sparse = layers - dense(layers)
    assert (report.matches["topk_route"], report.matches["moe_experts"]) == (sparse, sparse)
    # The shared expert of GLM-4.5 is a dense MLP beside the others.
    gated = dense(layers) + (sparse if name == "glm4_moe" else 0)
    assert report.matches["silu_and_mul"] == gated


# ---- what else decides


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"])
def test_compiled_routers_decide_as_eager_ones_do_but_for_ties(
    name: str, dtype: torch.dtype
) -> None:
    layer = mixture(name, "grouped_mm", dtype)
    router = layer.gate if hasattr(layer, "gate") else layer.router
    x = torch.randn(10_000, HIDDEN).to(dtype)
    compiled = torch.compile(
        lambda x: router(x), backend="atom", options={"strict": True, "glue": "eager"}
    )
    with torch.inference_mode():
        logits, _, ids = compiled(x)
        expected_logits, _, expected = router(x)
    assert atomc.reports()[-1].matches["topk_route"] == 1
    assert torch.equal(logits, expected_logits)
    differ = (ids.sort(-1).values != expected.sort(-1).values).any(-1)
    # Where they differ, the last chosen expert and the first one left out have equal logits.
    if name != "glm4_moe":
        ranked = logits[differ].float().sort(-1, descending=True).values
        assert torch.equal(ranked[:, TOP - 1], ranked[:, TOP])
    assert int(differ.sum()) <= (0 if dtype == torch.float32 or name == "glm4_moe" else 300)


def test_logits_that_are_returned_do_not_keep_a_router_from_being_recognized() -> None:
    layer = mixture("qwen3_moe", "grouped_mm", torch.bfloat16)

    def with_logits(x: Tensor) -> tuple[Tensor, Tensor]:
        logits, weights, ids = layer.gate(x)
        return layer.experts(x, ids, weights), logits

    report = explained(with_logits, torch.randn(5, HIDDEN).bfloat16(), tolerance=2e-2)
    assert (report.num_ops["topk_route"], report.num_ops["moe_experts"]) == (1, 1)


def test_weights_that_contain_the_bias_of_the_choice_are_no_router() -> None:
    def route(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (logits.sigmoid() + bias).topk(TOP, -1)
        return weights / weights.sum(-1, keepdim=True), ids

    rewritten(TOPK_ROUTE, route, torch.randn(5, NUM), torch.randn(NUM), matches=0)


def test_the_bias_of_a_product_is_none_of_the_choice() -> None:
    def route(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x @ weight + bias).topk(TOP, -1)
        return weights.softmax(-1), ids

    operands = torch.randn(5, 8), torch.randn(8, NUM), torch.randn(NUM)
    assert "softmax_of_chosen" in rewritten(TOPK_ROUTE, route, *operands, tolerance=1e-6)


def test_experts_read_the_ids_of_the_router_without_a_cast() -> None:
    layer = mixture("mixtral", "batched_mm", torch.float32)
    chosen = [each for each in passes.PIPELINE if not each.paged]
    text = after_passes(chosen, lambda x: layer(x), torch.randn(1, 5, HIDDEN)).text
    assert "moe_experts" in text and "topk_route" in text and "int64" not in text


def test_what_processes_exchange_besides_ids_keeps_its_cast() -> None:
    chosen = [each for each in passes.PIPELINE if each.name == "ids_as_chosen"]
    counts, pair = torch.arange(5, dtype=torch.int32), fake_group(2)
    text = after_passes(chosen, lambda x: ops.all_reduce(x.float(), pair), counts).text
    assert "float32" in text


def test_weights_with_another_number_of_experts_run_the_same_graph() -> None:
    def function(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        return ops.moe_experts(x, ids, weights, w13, w2)

    options = {"strict": True, "cache": False, "glue": "eager"}
    compiled = torch.compile(function, backend="atom", dynamic=True, options=options)
    before = atomc.reports()
    x, ids, weights, w13, w2 = WRITTEN_OUT
    for held in (4, 6):
        given = x, ids % held, weights, w13[:held].clone(), w2[:held].clone()
        assert torch.equal(compiled(*given), function(*given))
    assert len(since(before)) == 1


@pytest.mark.covering
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh")])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_that_are_written_out_are_one_op(
    tokens: int, activation: Callable[[Tensor], Tensor], biased: bool
) -> None:
    x, ids, weights, w13, w2 = WRITTEN_OUT
    b13, b2 = (torch.randn(w.shape[:2]).to(w.dtype) for w in (w13, w2))

    def with_biases(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        h = torch.einsum("tkih,th->tki", w13[ids], x) + b13[ids]
        gate, up = h.chunk(2, -1)
        y = torch.einsum("tkhi,tki->tkh", w2[ids], activation(gate) * up) + b2[ids]
        return (y * weights.unsqueeze(-1)).sum(1, dtype=torch.float32).to(x.dtype)

    given = (x[:tokens], ids[:tokens], weights[:tokens])
    if biased:
        report = explained(with_biases, *given, tolerance=2e-2)
    else:
        report = explained(written_out(act=activation), *given, w13, w2, tolerance=2e-2)
    assert report.num_ops["moe_experts"] == 1
    assert not report.num_ops.get("silu_and_mul") and [m.text() for m in report.near] == []


def test_without_transformers_the_pattern_of_its_functions_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = mixture("qwen3_moe", "grouped_mm", torch.float32)
    # The first trace of a process loads more, which would load it again.
    report = explained(lambda x: layer(x), torch.randn(1, 5, HIDDEN), tolerance=1e-5)
    assert (report.matches["topk_route"], report.matches["moe_experts"]) == (1, 1)
    # Not loaded, as where it is not installed: then no graph has its functions.
    monkeypatch.delitem(sys.modules, TRANSFORMERS)
    report = explained(lambda x: layer(x), torch.randn(1, 5, HIDDEN), tolerance=1e-5)
    assert (report.matches["topk_route"], report.matches["moe_experts"]) == (1, 0)
    assert report.bugs == []


@pytest.mark.rotating
def test_a_loop_over_experts_says_where_the_graph_ends_and_what_to_set() -> None:
    model = stock("qwen3_moe", "eager", torch.float32)
    before = atomc.reports()
    compiled = torch.compile(model, backend="atom", options={"glue": "eager"})
    with torch.inference_mode():
        compiled(input_ids=torch.arange(5)[None], use_cache=False)
    (why, *_) = [r.why("moe_experts") for r in since(before) if r.graph_break is not None]
    assert "modeling_qwen3_moe.py:" in why and "nonzero()" in why
    assert 'model.set_experts_implementation("grouped_mm")' in why
