"""The shared expert of a mixture is computed as one more of the chosen experts, where its weights
and activation allow it.
"""

import copy
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from merged_models import live_bytes
from test_moe_models import GLM, theirs_of
from torch import Tensor, nn

import atomc
from atomc.loading.loader import load
from atomc.models.experts import Experts
from atomc.program import compile_model
from atomc.report.report import Report
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.weights.packed import packed_together

# T tokens, E experts, K of each token, D width of the model, I width of an expert.
T, E, K, D, I = 7, 8, 2, 64, 32  # noqa: E741
X = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
ON = {"shared_expert": True}
EAGER = {"glue": "eager", "strict": True}
MoE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = dict(
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    head_dim=16,
    num_key_value_heads=4,
)
# name -> model_type, what differs from the tiny config, and how many layers have no experts.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "qwen2_moe": (
        "qwen2_moe",
        MoE | {"num_experts": 8, "shared_expert_intermediate_size": 32, "attention_bias": False},
        0,
    ),
    "glm4_moe": ("glm4_moe", GLM, 1),
    "deepseek_v3": ("deepseek_v3", MoE | DEEPSEEK | {"first_k_dense_replace": 1}, 1),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
        1,
    ),
}
SCHEMES = ["fp8", "fp8_per_token", "int8", "int4", "mxfp4"]


def last() -> Report:
    return atomc.reports()[-1]


def compiled(model: nn.Module, passes: dict[str, Any] = ON, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="atom", options={**EAGER, "passes": passes, **options})


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


# ---- Models


@pytest.mark.covering
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        pytest.param(
            name, layers, marks=[] if name == "glm4_moe" or layers == 2 else pytest.mark.slow
        )
        for name in MODELS
        for layers in (1, 2, 4)
    ],
)
def test_each_layer_with_experts_has_one_site_and_no_other_gate(name: str, layers: int) -> None:
    model_type, differs, dense = MODELS[name]
    model = theirs_of(model_type, **differs, num_hidden_layers=layers)
    atomc.explain(model, torch.arange(6)[None], options={"passes": ON, "strict": True})

    sparse = max(0, layers - dense)
    ops = last().num_ops
    assert last().matches["shared_expert"] == last().matches["moe_experts"] == sparse
    assert ops.get("silu_and_mul", 0) == min(dense, layers)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name",
    ["qwen2_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MODELS][1:])],
)
def test_logits_are_those_of_eager(name: str) -> None:
    model_type, differs, dense = MODELS[name]
    model = theirs_of(model_type, **differs, num_hidden_layers=2)
    ids = torch.arange(6)[None] % 50
    expected = model(ids, use_cache=False).logits

    actual = compiled(model)(ids, use_cache=False).logits
    assert last().matches["shared_expert"] == 2 - dense
    assert error(actual, expected) < 1e-5


@pytest.mark.rotating
def test_text_and_memory_of_a_served_model_are_those_of_its_shared_experts(tmp_path: Path) -> None:
    theirs_of("glm4_moe", **GLM, num_hidden_layers=3).save_pretrained(tmp_path)

    def told(passes: dict[str, bool]) -> list[list[int]]:
        llm = LLM(tmp_path, progress=False, num_blocks=64, options={**EAGER, "passes": passes})
        prompts = [list(range(1, 9)), [3, 3, 5]]
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        made = [output.token_ids for output in llm.generate(prompts, sampling)]
        assert last().matches["shared_expert"] == (2 if passes else 0)
        return made

    assert told(ON) == told({})

    model = load(tmp_path)
    before = live_bytes()
    program = compile_model(model, {**EAGER, "passes": ON}, owned=True)
    assert program.report.matches["shared_expert"] == 2
    assert live_bytes() - before < 4096  # an expert has 24 KiB
    mlp = model.model.layers[1].mlp
    assert packed_together(mlp.experts.down_proj) == [
        mlp.experts.down_proj,
        mlp.shared_experts.down_proj.weight,
    ]


@pytest.mark.rotating
def test_the_load_of_experts_counts_those_that_a_router_chose_and_the_report_says_shared(
    tmp_path: Path,
) -> None:
    theirs_of("glm4_moe", **GLM, num_hidden_layers=2).save_pretrained(tmp_path)
    options = {**EAGER, "passes": ON, "expert_load": True}
    llm = LLM(tmp_path, progress=False, num_blocks=64, options=options)
    llm.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1))

    [(_, counts)] = llm.engine.stats().expert_load.items()
    assert len(counts) == 8 and sum(counts) == 5 * 2
    [layer] = last().moe
    assert (layer.experts, layer.top_k) == (9, 3) and layer.router.endswith(", 1 shared")


# ---- One mixture


class Mixture(nn.Module):
    """Experts beside a shared one. changes: how a test departs from what fits."""

    def __init__(
        self, inner: int = I, bias: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(D, E, bias=False)
        self.experts = Experts(E, D, I)
        self.gate_proj = nn.Linear(D, inner, bias=False)
        self.up_proj = nn.Linear(D, inner, bias=bias)
        self.down_proj = nn.Linear(inner, D, bias=False)
        self.column = nn.Linear(D, 1, bias=False)
        self.eval().requires_grad_(False)

    def routed(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1, dtype=torch.float32).topk(K)
        return self.experts(x, ids, weights)  # type: ignore[no-any-return]

    def shared(self, x: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return self.shared(x) + self.routed(x)


class Scaled(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.column(x).sigmoid() * self.shared(x)


class InBatch(Mixture):
    """The shared expert reads x before it is flattened."""

    def forward(self, x: Tensor) -> Any:
        x = x.view(1, T, D)
        scaled = self.shared(x) * self.column(x).sigmoid()
        return self.routed(x.view(-1, D)).view(1, T, D) + scaled


@pytest.mark.parametrize("kind", [Mixture, Scaled, InBatch])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shared_expert_becomes_a_row_of_the_experts(kind: type[Mixture], dynamic: bool) -> None:
    model = kind()
    run = torch.compile(model, backend="atom", options={**EAGER, "passes": ON}, dynamic=dynamic)
    assert error(run(X), model(X)) < 1e-6
    assert last().matches["shared_expert"] == 1 and "silu_and_mul" not in last().num_ops


def test_in_bf16_the_sum_is_as_close_to_fp32_as_with_a_shared_expert_of_its_own() -> None:
    exact = Scaled()(X)
    x = X.bfloat16()
    apart = (compiled(Scaled().bfloat16(), {})(x) - exact).abs().mean()
    torch._dynamo.reset()
    together = (compiled(Scaled().bfloat16())(x) - exact).abs().mean()
    assert last().matches["shared_expert"] == 1
    assert together < 1.1 * apart


@pytest.mark.covering
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_each_scheme_take_a_shared_one_of_that_scheme(scheme: str) -> None:
    model = theirs_of(
        "qwen2_moe", **MODELS["qwen2_moe"][1], num_hidden_layers=1, dtype=torch.bfloat16
    )
    atomc.quantize(model, scheme)
    ids = torch.arange(6)[None]
    expected = compiled(copy.deepcopy(model), {})(ids, use_cache=False).logits
    torch._dynamo.reset()
    actual = compiled(model)(ids, use_cache=False).logits
    assert last().matches["shared_expert"] == 1
    assert error(actual.float(), expected.float()) < 0.02


@pytest.mark.rotating
def test_nothing_is_held_twice_and_weights_that_a_user_writes_are_read() -> None:
    model = Mixture()
    before = live_bytes()
    run = compiled(model)
    run(X)
    gc.collect()
    assert live_bytes() - before < 4096  # an expert has 24 KiB

    model.up_proj.weight.mul_(2)
    model.experts.down_proj[3].zero_()
    assert error(run(X), model(X)) < 1e-6
    model.down_proj.weight.data = torch.randn(D, I)  # in memory of its own: packed again
    assert error(run(X), model(X)) < 1e-6
    model.load_state_dict({name: x.clone() for name, x in Mixture(I).state_dict().items()})
    assert error(run(X), Mixture(I)(X)) < 1e-6


def test_a_graph_without_it_leaves_the_weights_where_the_first_graph_packed_them() -> None:
    model = Mixture()
    compiled(model)(X)
    torch._dynamo.reset()
    assert error(compiled(model, {})(X), model(X)) < 1e-6
    assert "packed" in [miss.kind for miss in last().misses("merge_linears")]


def test_blocks_that_end_inside_an_expert_are_refused() -> None:
    model = theirs_of(
        "qwen2_moe", **MODELS["qwen2_moe"][1], num_hidden_layers=1, dtype=torch.bfloat16
    )
    atomc.quantize(model, "fp8_block")
    compiled(model)(torch.arange(6)[None], use_cache=False)
    assert "rows end inside a block of 128" in last().why("shared_expert")


# ---- Near misses


class Returned(Mixture):
    def forward(self, x: Tensor) -> Any:
        shared = self.shared(x)
        return self.routed(x) + shared, shared


class RoutedReturned(Mixture):
    def forward(self, x: Tensor) -> Any:
        routed = self.routed(x)
        return routed + self.shared(x), routed


class Gelu(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.shared(x, F.gelu)


class Relu(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.shared(x, F.relu)


class OtherInput(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.shared(x * 2)


class PerColumn(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.shared(x) * self.router.weight[0]


class Tied(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.shared(x), x @ self.up_proj.weight.T


class Broadcast(Mixture):
    def forward(self, x: Tensor) -> Any:
        return self.routed(x) + self.shared(x)[:1]


def of_another_scheme() -> Mixture:
    model = Mixture().bfloat16()
    atomc.quantize(model, "int8", ignore=["experts"])
    return model


# What is between it and a row of the experts: model, kind, expected and found.
NEAR: dict[str, tuple[Callable[[], Mixture], str, str, str]] = {
    "another activation": (Gelu, "guard", "^silu, as the routed experts", "^gelu"),
    "an activation that is no op": (Relu, "other op", "a gated activation", "^mul"),
    "another width": (lambda: Mixture(48), "size", "^32 columns", "^48$"),
    "several experts wide": (lambda: Mixture(2 * I), "size", "^32 columns", "^64; .* be copied"),
    "another x": (OtherInput, "same value", "^x of the routed experts", "mul"),
    "a bias": (lambda: Mixture(bias=True), "guard", "^no bias", "is added"),
    "another reader of it": (Returned, "extra user", "no other reader", "2 nodes read it"),
    "another reader of the experts": (
        RoutedReturned,
        "extra user",
        "no other reader of moe_experts",
        "2 nodes read it",
    ),
    "a factor per column": (PerColumn, "other op", "^a factor per token", "^mul"),
    "a weight with another reader": (Tied, "guard", "one more row of w13", "has other readers"),
    "another scheme": (of_another_scheme, "other op", "^linear, as moe_experts", "int8"),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_shared_expert_that_does_not_fit_says_why(name: str) -> None:
    make, kind, expected, found = NEAR[name]
    model = make()
    x = X.to(next(model.parameters()).dtype)
    run = compiled(model)
    assert run(x) is not None and last().matches["moe_experts"] == 1
    assert not last().matches["shared_expert"]
    [miss] = last().misses("shared_expert")
    assert miss.kind == kind and miss.text() in last().why("shared_expert")
    assert re.search(expected, miss.expected) and re.search(found, miss.found), miss


def test_rounding_as_the_model_does_forbids_it() -> None:
    compiled(Mixture(), rounding="hf")(X)
    assert "the sum would round once less" in last().why("shared_expert")


def test_it_is_off_by_default_and_in_modules_that_an_option_names() -> None:
    compiled(Mixture(), {})(X)
    assert last().why("shared_expert").startswith("shared_expert: off by default; on with")

    torch._dynamo.reset()
    model = nn.ModuleDict({"first": Mixture(), "second": Scaled()})
    run = torch.compile(
        lambda x: model["second"](model["first"](x)),
        backend="atom",
        options={**EAGER, "passes": {"shared_expert": ["*first*"]}},
    )
    run(X)
    assert last().matches["shared_expert"] == 1
    assert "off here" in last().why("shared_expert")
