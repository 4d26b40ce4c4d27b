"""Routers and experts of stock models, and experts that are written out, become one op each, with
eager's values.
"""

from typing import Any

import pytest
import torch
from rewriting import explained
from torch import nn

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
    """Each kind in one combination per change, and GPT-OSS in all."""
    combinations = [
        (implementation, dtype, dynamic)
        for implementation in IMPLEMENTATIONS
        for dtype in DTYPES
        for dynamic in (False, True)
    ]
    return [
        per_change(name, *combination, now=name == "gpt_oss" or (i + j) % len(combinations) == 0)
        for i, name in enumerate(KINDS)
        for j, combination in enumerate(combinations)
    ]


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
    assert [miss.text() for miss in report.near] == []
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
