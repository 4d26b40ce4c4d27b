"""Mixtures of experts in costs, plans and reports, compared with sums made by hand. T tokens, k
experts of each, E experts, H and INNER, widths of model and expert.
"""

import json

import pytest
import torch
from rewriting import TIDY, after_passes
from torch import Tensor

from atomc import ops
from atomc.compiler.explain import explain
from atomc.cost import cost
from atomc.cost.moe_layers import moe_layers
from atomc.cost.quantized_weights import quantized_weights
from atomc.loading.create_model import create_model
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import ExpertsRead, Workload
from atomc.planning.step_plan import compile_for, plan_step
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.report.kernel_ranges import kernels_by_tokens
from atomc.report.records import KernelChoice
from atomc.report.render import formula
from atomc.report.report import Report
from atomc.rewriting.graph_pass import Pass
from atomc.testing.examples import EXAMPLES
from atomc.testing.random_inputs import RandomInputs

E, K, H, INNER = 128, 8, 2048, 768  # Qwen3-30B-A3B
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": E,
    "num_experts_per_tok": K,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
TINY = QWEN3_MOE | {
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [0],
    "vocab_size": 512,
}
ROUTER = {"k": 2, "score": "sigmoid", "groups": 4, "topk_groups": 2, "group_score": "top2"}


def traced(function, *inputs):
    """Costs, mixtures and quantized weights of the graph of function(*inputs)."""
    found = {}

    def look(gm, context):
        found["costs"] = cost.graph_costs(gm)
        found["layers"], found["quantized"] = moe_layers(gm), quantized_weights(gm)
        return []

    after_passes([TIDY, Pass("look", look)], function, *inputs)
    return found


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def routed(tokens, k=K):
    """The ids and weights of so many tokens."""
    return meta(tokens, k, dtype=torch.int32), meta(tokens, k, dtype=torch.float32)


@pytest.mark.parametrize(
    ("tokens", "distinct", "megabytes"), [(1, 8.0, 75.5), (8, 51.6, 487.0), (64, 125.9, 1189.0)]
)
def test_experts_read_the_expected_number_of_distinct_ones(tokens, distinct, megabytes):
    (found,) = traced(
        lambda *given: ops.moe_experts(*given),
        meta(tokens, H),
        *routed(tokens),
        meta(E, 2 * INNER, H),
        meta(E, H, INNER),
    )["costs"]
    weights = 2 * 3 * H * INNER * E * (1 - (1 - K / E) ** tokens)
    rows = tokens * (2 * 2 * H + (4 + 4) * K)
    assert found.cost.bytes == pytest.approx(weights + rows)
    assert weights / (2 * 3 * H * INNER) == pytest.approx(distinct, abs=0.05)
    assert weights / 1e6 == pytest.approx(megabytes, rel=2e-3)
    assert found.cost.flops == 2 * tokens * K * 3 * H * INNER  # only the chosen ones multiply


@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.bfloat16, 1), (torch.float8_e4m3fn, 2), (torch.uint8, 4)]
)
def test_products_with_mxfp4_weights_run_at_the_rate_of_their_activations(dtype, rate):
    tokens, experts, width = 8, 4, 64
    u8, packed = torch.uint8, dtype == torch.uint8
    x = meta(tokens, width // 2 if packed else width, dtype=dtype)
    scales = {torch.bfloat16: (), torch.uint8: (meta(tokens, width // 32, dtype=u8),)}
    x_scale = scales.get(dtype, (meta(tokens, 1, dtype=torch.float32),))
    weights = (
        meta(experts, 2 * width, width // 2, dtype=u8),
        meta(experts, 2 * width, width // 32, dtype=u8),
        meta(experts, width, width // 2, dtype=u8),
        meta(experts, width, width // 32, dtype=u8),
    )

    def both(x, ids, probabilities, w13, w13_scale, w2, w2_scale, x_scale=None):
        given = {"x_scale": x_scale, "out_dtype": torch.bfloat16}
        y = ops.moe_experts_mxfp4(x, ids, probabilities, w13, w13_scale, w2, w2_scale, **given)
        return y, ops.linear_mxfp4(x, w2[0], w2_scale[0], **given)

    costs = traced(both, x, *routed(tokens, 2), *weights, *x_scale)["costs"]
    rates = {found.op: found.rate for found in costs}
    assert rates["moe_experts_mxfp4"] == rates["linear_mxfp4"] == rate
    assert {rates[op] for op in rates if not op.endswith("mxfp4")} <= {1}


def test_experts_in_mxfp4_read_codes_scales_and_biases_of_those_that_are_hit():
    tokens, experts, k, width = 8, 32, 4, 2880  # GPT-OSS-20B
    codes, scales = width // 2, width // 32
    u8 = torch.uint8
    given = {
        "w13": meta(experts, 2 * width, codes, dtype=u8),
        "w13_scale": meta(experts, 2 * width, scales, dtype=u8),
        "w2": meta(experts, width, codes, dtype=u8),
        "w2_scale": meta(experts, width, scales, dtype=u8),
        "b13": meta(experts, 2 * width),
        "b2": meta(experts, width),
    }

    def layer(x, ids, weights, *stored):
        return ops.moe_experts_mxfp4(
            x, ids, weights, *stored, out_dtype=torch.bfloat16, activation="swiglu_oai"
        )

    found = traced(layer, meta(tokens, width), *routed(tokens, k), *given.values())
    hit = experts * (1 - (1 - k / experts) ** tokens)
    of_one = 3 * width * (codes + scales) + 2 * 3 * width
    (of_layer,) = found["costs"]
    assert of_layer.cost.bytes == pytest.approx(hit * of_one + tokens * (2 * 2 * width + 8 * k))
    assert of_layer.cost.flops == 2 * tokens * k * 3 * width * width
    (size,), (mixture,) = found["quantized"], found["layers"]
    assert (size.op, size.scheme) == ("moe_experts_mxfp4", "mxfp4, one scale per 32 inputs")
    assert size.bytes == experts * 3 * width * (codes + scales)
    assert size.full_bytes == 2 * experts * 3 * width * width
    assert mixture.bytes == experts * of_one
    assert mixture.weights == experts * 3 * width * (width + 1)


@pytest.mark.parametrize(
    ("op", "example", "scheme", "codes"),
    [
        (ops.moe_experts_fp8, "", "fp8, one scale per output", 1),
        (ops.moe_experts_fp8, "blocks", "fp8, one scale per square of 128", 1),
        (ops.moe_experts_int8, "", "int8, one scale per output", 1),
        (ops.moe_experts_w4a16, "", "int4, one scale per 32 inputs", 8),
        (ops.moe_experts_mxfp4, "", "mxfp4, one scale per 32 inputs", 2),
    ],
)
def test_quantized_experts_are_listed_with_what_they_save(op, example, scheme, codes):
    given = EXAMPLES[op][example](RandomInputs(torch.bfloat16, "cpu", 3))
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    other = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
    found = traced(
        lambda *args: op(**dict(zip(tensors, args, strict=True)), **other), *tensors.values()
    )
    (size,), (layer,) = found["quantized"], found["layers"]
    stored = [x for name, x in tensors.items() if name.startswith(("w13", "w2"))]
    assert (size.op, size.scheme) == (op.name, scheme) and layer.scheme == scheme
    assert size.bytes == sum(x.nbytes for x in stored)
    assert size.full_bytes == 2 * codes * (tensors["w13"].numel() + tensors["w2"].numel())
    assert 0.2 < size.bytes / size.full_bytes < 0.6


def test_a_mixture_says_how_its_router_chooses():
    def layer(x, logits, bias, w13, w2):
        weights, ids = ops.topk_route(
            logits, bias, **ROUTER, renormalize=True, scale=2.5, dtype=torch.bfloat16
        )
        return ops.moe_experts(x, ids.long(), weights, w13, w2)

    weights = meta(8, 32, 16), meta(8, 16, 16)
    given = (meta(5, 16), meta(5, 8), meta(8, dtype=torch.float32), *weights)
    (found,) = traced(layer, *given)["layers"]
    assert found.router == (
        "sigmoid, biased choice, 2 of 4 groups by their best two, renormalized, times 2.5"
    )
    assert (found.experts, found.top_k, found.scheme) == (8, 2, "bfloat16")
    (found,) = traced(ops.moe_experts, meta(5, 16), *routed(5, 2), *weights)["layers"]
    assert found.router == ""


# Plans and reports of models


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory):
    """Two layers of Qwen3-30B-A3B compiled for an H200."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    platform = Platform.named("h200")
    model = build_model(folder, layers=2, platform=platform)
    return model, platform, compile_for(model, platform)


@pytest.mark.rotating
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_plan_of_a_mixture_counts_the_experts_that_its_tokens_hit(qwen3_moe, tokens):
    model, platform, program = qwen3_moe
    found = plan_step(model, platform, Workload(tokens, tokens), program=program)
    (row,) = [row for row in found.lines if row.op == "moe_experts"]
    distinct = E * (1 - (1 - K / E) ** tokens)
    rows = tokens * (2 * 2 * H + 4 * K + 2 * K)  # weights of the router in bf16
    assert row.calls == 2
    assert row.bytes == pytest.approx(2 * 3 * H * INNER * distinct + rows)
    assert row.flops == 2 * tokens * K * 3 * H * INNER
    assert found.mixture.read == [ExpertsRead(2, E, K, pytest.approx(distinct))]
    assert f"{distinct:.1f} of 128 in each of 2 layers" in found.to_text()
    assert found.to_dict()["mixture"]["read"][0]["distinct"] == pytest.approx(distinct)


def test_all_experts_are_held_and_few_are_active(qwen3_moe):
    model, platform, program = qwen3_moe
    found = plan_step(model, platform, Workload(), program=program)
    experts, expert = 2 * E, 3 * H * INNER
    parameters = sum(x.numel() for x in model.module.parameters())
    assert found.mixture.held == 2 * experts * expert
    assert found.mixture.held < found.memory.weights
    assert found.mixture.parameters == parameters
    assert found.mixture.active == parameters - 2 * (E - K) * expert


@pytest.fixture(scope="module")
def tiny():
    """A model with a dense layer and two mixtures of experts, explained for an H200."""
    model = create_model(TINY, dtype=torch.bfloat16, device="meta")
    return compile_model(model, {"glue": "eager"}, Platform.named("h200")).report


@pytest.mark.rotating
def test_the_report_shows_router_experts_scheme_and_kernels_by_tokens(tiny):
    assert [layer.layer for layer in tiny.moe] == [1, 2]
    text = tiny.to_text()
    header = "mixtures of experts\nlayers  experts  top-k  weights   tokens      runs as  router"
    first, second = text.partition(header)[2].splitlines()[1:3]
    assert header in text
    for row, tokens in ((first, "1 to 2"), (second, "3 and more")):
        assert row.split() == [
            *("1-2", "8", "2", "bfloat16"),
            *tokens.split(),
            *("triton", "softmax,", "renormalized"),
        ]
    assert Report.of(json.loads(tiny.to_json())).moe == tiny.moe


def test_neighbouring_ranges_of_one_kernel_are_one():
    few = [("triton", "is meant for 1 to 16 tokens")]
    choices = [
        KernelChoice("moe_experts", "mlp", "1 to 16", "triton"),
        KernelChoice("moe_experts", "mlp", "17 to 128", "triton", few),
        KernelChoice("moe_experts", "mlp", "129 and more", "triton", few),
    ]
    assert kernels_by_tokens(choices) == [("1 to 16", "triton"), ("17 and more", "triton")]
    assert kernels_by_tokens(choices[1:2]) == [("17 to 128", "triton")]


@pytest.mark.rotating
def test_the_page_lists_mixtures_and_evaluates_their_formula(tiny):
    page = tiny.to_html()
    section = page.partition("Mixtures of experts</h3>")[2].partition("</section>")[0]
    for text in ("softmax, renormalized", "1-2", "1 to 2 tokens", "3 and more tokens"):
        assert text in section
    (cost,) = {found.bytes for found in tiny.costs if found.op == "moe_experts"}
    of_one = 2 * 3 * 128 * 64
    for tokens in (1, 3):
        expected = of_one * 8 * (1 - 0.75**tokens) + tokens * (2 * 2 * 128 + 6 * 2)
        assert formula.evaluated(formula.tree(cost), {"T": tokens}) == pytest.approx(expected)


def test_a_model_without_experts_has_no_line_of_them():
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    report = explain(lambda x, w: ops.linear(x, w), x, w)
    assert report.moe == [] and "mixtures of experts" not in report.to_text()
    assert "Mixtures of experts</h3>" not in report.to_html()
