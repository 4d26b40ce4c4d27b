"""How often each rewrite fires on whole models, by formula, whatever the depth and however sizes
are made dynamic.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from rewriting import since
from tiny_models import SIZES
from torch import Tensor, nn

import atomc
from atomc import program
from atomc.loading.create_model import create_model
from atomc.models import qwen3
from atomc.report.report import Report
from atomc.stock.adapter import wrap_stock
from atomc.torch_compat.tracing import mark_unbacked

transformers = pytest.importorskip("transformers")

TINY = dict(**SIZES, pad_token_id=0)
OURS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STRICT = {"strict": True, "glue": "eager"}


def formula(kind: str, layers: int) -> dict[str, int]:
    norms_of_heads = 2 * layers if kind == "qwen3" else 0
    return {
        "rms_norm": 2 * layers + 1 + norms_of_heads,
        "add_rms_norm": 2 * layers,
        "silu_and_mul": layers,
        "attention": layers,
        "rope": 2 * layers,
        "qk_norm_rope": layers if kind == "qwen3" else 0,
    }


def own(
    kind: str, layers: int, device: str = "meta", dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    config = {
        **TINY,
        "num_hidden_layers": layers,
        "architectures": [OURS[kind]],
        "model_type": kind,
    }
    return create_model(config, dtype=dtype, device=device).eval().requires_grad_(False)


def stock(
    kind: str,
    layers: int,
    device: str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    **differs: object,
) -> nn.Module:
    config = transformers.AutoConfig.for_model(
        kind, **(TINY | {"num_hidden_layers": layers, "eos_token_id": 0} | differs)
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager" if kind == "gpt_oss" else "sdpa"
        )
    return model.eval().requires_grad_(False)


def counted(report: Report, names: dict[str, int]) -> dict[str, int]:
    """How often the named rewrites fired. Nothing nearly fired, and nothing was refused without a
    reason.
    """
    assert report.treated, report.why_not
    assert [miss.text() for miss in report.near] == []
    assert report.bugs == []
    return {name: report.matches[name] for name in names}


# ---- the formulas


def per_change(*values: object, now: bool) -> Any:
    """A row of parameters; unless `now`, left to `make test-all`."""
    return pytest.param(*values, marks=() if now else pytest.mark.slow)


# Per change one layer in any number of tokens, which stock layers have further down, and more in a
# known one.
NOW = (
    ("qwen3", own, 4, False),
    ("llama", own, 1, True),
    ("llama", stock, 2, False),
)


@pytest.mark.parametrize(
    ("kind", "make", "layers", "dynamic"),
    [
        per_change(kind, make, layers, dynamic, now=(kind, make, layers, dynamic) in NOW)
        for kind in OURS
        for make in (own, stock)
        for layers in (1, 2, 4)
        for dynamic in (False, True)
    ],
)
def test_the_counts_follow_the_formula_at_any_depth(
    kind: str, make: Callable[..., nn.Module], layers: int, dynamic: bool
) -> None:
    report = atomc.explain(make(kind, layers), dynamic=dynamic, options=STRICT)
    assert counted(report, formula(kind, layers)) == formula(kind, layers)
    # The first norm of the model has no add before it.
    assert report.num_ops["rms_norm"] == 1


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "make", "dynamic"),
    [
        per_change("qwen3", stock, True, now=False),
        per_change("qwen3", stock, False, now=False),
        ("qwen3", own, False),
        per_change("llama", stock, False, now=False),
        per_change("llama", own, True, now=False),
    ],
)
def test_the_counts_follow_the_formula_at_28_layers(
    kind: str, make: Callable[..., nn.Module], dynamic: bool
) -> None:
    report = atomc.explain(make(kind, 28), dynamic=dynamic, options=STRICT)
    assert counted(report, formula(kind, 28)) == formula(kind, 28)
    assert report.num_ops["rms_norm"] == 1
    assert {site.layer for site in report.sites if site.rewrite == "silu_and_mul"} == set(range(28))


@pytest.mark.parametrize(
    "make", [own, lambda kind, layers: wrap_stock(stock(kind, layers))], ids=["own", "stock"]
)
@pytest.mark.parametrize(
    ("kind", "layers"),
    [("qwen3", 3), per_change("llama", 1, now=False), per_change("mistral", 2, now=False)],
)
def test_in_the_runtime_each_layer_writes_its_keys_in_one_op(
    kind: str, make: Callable[..., nn.Module], layers: int
) -> None:
    normed = kind == "qwen3"
    expected = {
        **formula(kind, layers),
        "qk_norm_rope_kv_write": normed * layers,
        "rope_kv_write": (not normed) * layers,
    }

    model = make(kind, layers)
    report = program.compile_model(model, options=STRICT).report
    assert counted(report, expected) == expected
    assert {"rope", "kv_write", "qk_norm_rope", "attention"}.isdisjoint(report.num_ops)


# ---- spellings of the layer that change nothing


class SwappedAdds(qwen3.Layer):
    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_TD = self.self_attn(self.input_layernorm(x_TD), cos, sin) + x_TD
        x_TD = self.mlp(self.post_attention_layernorm(x_TD)) + x_TD
        return x_TD


class ReshapedNorms(qwen3.Layer):
    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD[None])[0], cos, sin)
        x_TD = x_TD + self.mlp(
            self.post_attention_layernorm(x_TD.reshape(1, -1, 64)).reshape(x_TD.shape)
        )
        return x_TD


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("layer", "dynamic"),
    [
        (SwappedAdds, False),
        (ReshapedNorms, True),
        per_change(SwappedAdds, True, now=False),
        per_change(ReshapedNorms, False, now=False),
    ],
)
def test_swapped_adds_and_a_reshape_before_the_norm_change_no_count(
    layer: type[nn.Module], dynamic: bool
) -> None:
    model = own("qwen3", 2, device="cpu", dtype=torch.float32)
    for given in model.model.layers:
        given.__class__ = layer
    ids, positions = torch.arange(12) % 96, torch.arange(12)

    compiled = torch.compile(model, backend="atom", dynamic=dynamic, options=STRICT)
    with torch.inference_mode():
        actual, expected = compiled(ids, positions), model(ids, positions)
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
    report = atomc.reports()[-1]
    assert counted(report, formula("qwen3", 2)) == formula("qwen3", 2)
    assert report.num_ops["rms_norm"] == 1


# ---- seven stock kinds, five ways to treat sizes

KINDS = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "phi3": {"partial_rotary_factor": 1.0},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["full_attention"]},
    "gpt_oss": {**EXPERTS, "layer_types": ["full_attention"]},
    "mixtral": EXPERTS,
}
# Per change those whose layer no other test has; in a prompt of one token, one of them all.
OWN_KINDS = [per_change(kind, now=kind in ("phi3", "gpt_oss")) for kind in KINDS]
SOME_KINDS = [per_change(kind, now=kind == "qwen3") for kind in KINDS]
MIXTURE = {"topk_route": 1, "moe_experts": 1}
OF_ONE_LAYER = {
    "qwen3": formula("qwen3", 1),
    "llama": formula("llama", 1),
    "mistral": formula("llama", 1),
    "phi3": formula("llama", 1),
    "gemma3_text": {
        "rms_norm": 7,
        "add_rms_norm": 2,
        "gelu_and_mul": 1,
        "attention": 1,
        "rope": 2,
        "qk_norm_rope": 1,
    },
    "gpt_oss": {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "attention": 1} | MIXTURE,
    "mixtral": {**formula("llama", 1), "silu_and_mul": 0} | MIXTURE,
}


@cache
def one_layer(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    model = stock(kind, 1, device="cpu", dtype=torch.float32, **KINDS[kind])
    return lambda ids, positions: (
        model(input_ids=ids, position_ids=positions, use_cache=False).logits
    )


def tokens(
    count: int, mark: Callable[[Tensor, int], object] = lambda x, dim: None
) -> tuple[Tensor, Tensor]:
    # Not the padding token 0, whose embedding is zero.
    ids, positions = torch.arange(1, count + 1)[None] % 96, torch.arange(count)[None]
    mark(ids, 1), mark(positions, 1)
    return ids, positions


def check(
    forward: Callable[..., Tensor],
    expected: dict[str, int],
    *inputs: tuple[Tensor, Tensor],
    dynamic: bool | None = None,
    graphs: int = 1,
) -> None:
    """Compiled, it computes what eager does for each of the inputs, and each graph has the expected
    counts.
    """
    before = atomc.reports()
    compiled = torch.compile(forward, backend="atom", options=STRICT, dynamic=dynamic)
    with torch.inference_mode():
        for given in inputs:
            actual, wanted = compiled(*given), forward(*given)
            assert (actual - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    made = since(before)
    assert [counted(report, expected) for report in made] == [expected] * graphs


@pytest.mark.rotating
@pytest.mark.parametrize("kind", OWN_KINDS)
def test_the_same_is_recognised_when_the_token_count_is_marked_dynamic(kind: str) -> None:
    mark = torch._dynamo.mark_dynamic
    check(one_layer(kind), OF_ONE_LAYER[kind], tokens(12, mark), tokens(7))


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_same_is_recognised_in_a_prompt_of_one_token(kind: str) -> None:
    check(one_layer(kind), OF_ONE_LAYER[kind], tokens(1), dynamic=False)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["qwen3", per_change("gemma3_text", now=False)])
def test_the_same_is_recognised_when_everything_is_dynamic(kind: str) -> None:
    check(one_layer(kind), OF_ONE_LAYER[kind], tokens(12), tokens(7), dynamic=True)


@pytest.mark.rotating
def test_the_same_is_recognised_when_sizes_become_dynamic_by_themselves() -> None:
    check(one_layer("qwen3"), OF_ONE_LAYER["qwen3"], tokens(12), tokens(7), tokens(9), graphs=2)


@pytest.mark.parametrize("kind", [per_change(kind, now=kind == "qwen3") for kind in OURS])
def test_the_same_is_recognised_when_nothing_is_known_about_the_token_count(kind: str) -> None:
    # One graph, also for a single token.
    check(
        own(kind, 1, device="cpu", dtype=torch.float32),
        formula(kind, 1),
        tokens(12, mark_unbacked),
        tokens(1),
    )


@pytest.mark.rotating
@pytest.mark.parametrize("kind", ["qwen3", per_change("gpt_oss", now=False)])
def test_a_stock_layer_is_recognised_whole_when_nothing_is_known_about_the_token_count(
    kind: str,
) -> None:
    before = atomc.reports()
    compiled = torch.compile(one_layer(kind), backend="atom", options=STRICT)
    with torch.inference_mode():
        compiled(*tokens(12, mark_unbacked))
    # The mask code of transformers may break the graph at sizes it cannot know; not within the
    # layers.
    of_layers = [report for report in since(before) if report.matches["rms_norm"]]
    assert [counted(report, OF_ONE_LAYER[kind]) for report in of_layers] == [OF_ONE_LAYER[kind]]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        per_change(
            kind,
            dtype,
            now=(kind, dtype) in (("qwen3", torch.bfloat16), ("mistral", torch.float32)),
        )
        for kind in OURS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_a_compiled_stock_model_computes_what_eager_does(kind: str, dtype: torch.dtype) -> None:
    model = stock(kind, 2, device="cpu", dtype=dtype)
    ids, positions = tokens(12)
    compiled = torch.compile(model, backend="atom", options=STRICT)
    with torch.inference_mode():
        actual = compiled(input_ids=ids, position_ids=positions, use_cache=False).logits
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert (actual - expected).abs().max() <= (
        1e-4 if dtype == torch.float32 else 1e-2
    ) * expected.abs().max()
    assert counted(atomc.reports()[-1], formula(kind, 2)) == formula(kind, 2)
