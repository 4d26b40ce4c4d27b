"""What routers and experts mean: equal to the classes of transformers, and to plain formulas."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kernel_cases.draw import Draw
from kernel_cases.experts import fp8, fp8_block, full, int4, int8, mxfp4
from torch import Tensor, nn
from torch.testing import assert_close

from atomc import ops
from atomc.ops.experts import gated
from atomc.ops.scaled_linear import int4_weight, mxfp4_values

transformers = pytest.importorskip("transformers")

DTYPES = [torch.float32, torch.bfloat16]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_num_experts": 16,
    "moe_k": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
}
LIMITED = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}
DEEPSEEK = {
    "score": "sigmoid",
    "groups": 4,
    "topk_groups": 2,
    "group_score": "top2",
    "renormalize": True,
    "eps": 1e-20,
}

# (model_type, module, class of the router, what its config adds, the op's arguments).
ROUTERS = [
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, {"renormalize": True}),
    ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, {}),
    ("mixtral", "MixtralTopKRouter", {}, {"renormalize": True}),
    ("gpt_oss", "GptOssTopKRouter", {}, {"score": "softmax_of_chosen"}),
    ("granitemoe", "GraniteMoeTopKRouter", {}, {"score": "softmax_of_chosen"}),
    ("glm4_moe", "Glm4MoeTopkRouter", {"routed_scaling_factor": 2.5}, DEEPSEEK | {"scale": 2.5}),
    (
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        LIMITED,
        {"groups": 4, "topk_groups": 2, "scale": 16.0},
    ),
    (
        "ernie4_5_moe",
        "Ernie4_5_MoeTopKRouter",
        {"moe_norm_min": 0.3},
        {"renormalize": True, "min_sum": 0.3},
    ),
]


def module_of(kind: str) -> SimpleNamespace:
    return getattr(getattr(transformers.models, kind), f"modeling_{kind}")


def router(kind: str, name: str, added: dict[str, object], dtype: torch.dtype) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SMALL, **added)
    made = getattr(module_of(kind), name)(config).requires_grad_(False)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape) / 8
    biases = {name: buffer for name, buffer in made.named_buffers() if "bias" in name}
    made = made.to(dtype)
    for name, buffer in biases.items():  # it stays fp32 in a model of 16 bits
        setattr(made, name, torch.randn(buffer.shape) / 4)
    return made


def choice_bias(made: nn.Module) -> Tensor | None:
    for name, tensor in (*made.named_buffers(), *made.named_parameters()):
        if "e_score_correction_bias" in name:
            return tensor.flatten().float()
    return None


def in_order(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """By id: transformers leaves the order of some choices open."""
    order = ids.argsort(-1)
    return weights.gather(-1, order), ids.gather(-1, order).long()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "name", "added", "given"), ROUTERS, ids=[r[0] for r in ROUTERS])
def test_a_router_chooses_what_the_class_of_transformers_chooses(
    kind: str, name: str, added: dict, given: dict, dtype: torch.dtype
) -> None:
    made = router(kind, name, added, dtype)
    x = torch.randn(10_000, 64).to(dtype)
    outputs = made(x)
    # GraniteMoeTopKRouter of transformers 5.17 returns the ids first.
    logits, weights, ids = outputs[:: 1 if outputs[0].is_floating_point() else -1]
    actual = ops.topk_route(logits, choice_bias(made), k=4, dtype=weights.dtype, **given)
    (actual_weights, actual_ids), (weights, ids) = in_order(*actual), in_order(weights, ids)
    assert torch.equal(actual_ids, ids)
    # transformers sums some weights in another order.
    assert_close(
        actual_weights, weights, rtol=1e-6 if weights.dtype == torch.float32 else 0, atol=0
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_product_and_the_choice_in_one_op_are_the_two_ops(dtype: torch.dtype) -> None:
    made = router("gpt_oss", "GptOssTopKRouter", {}, dtype)
    x = torch.randn(100, 64).to(dtype)
    given = {"k": 4, "score": "softmax_of_chosen"}
    joined = ops.linear_topk_route(x, made.weight, made.bias, logits_dtype=dtype, **given)
    assert_close(joined, ops.topk_route(made(x)[0], **given), rtol=0, atol=0)


def test_a_choice_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 2.0])
    weights, ids = ops.topk_route(logits, bias, k=2, score="sigmoid")
    assert ids.tolist() == [[3, 0]]
    assert_close(weights, torch.tensor([[0.5, torch.tensor(3.0).sigmoid()]]))


def test_scores_by_the_square_root_of_softplus_follow_their_formula() -> None:
    logits = torch.randn(5, 8)
    weights, ids = ops.topk_route(logits, k=3, score="sqrt_softplus")
    assert_close(weights, (1 + logits.exp()).log().sqrt().gather(-1, ids.long()))


def test_an_unknown_score_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'tanh' is not one of"):
        ops.topk_route.reference(torch.randn(1, 4), k=1, score="tanh")
    with pytest.raises(ValueError, match="'mean' is not one of"):
        ops.topk_route.reference(torch.randn(1, 4), k=1, groups=2, group_score="mean")
    with pytest.raises(ValueError, match="'relu' is not one of"):
        gated(torch.randn(1, 4), "relu", False, 1.0, None)


# (model_type, class of the experts, the op's arguments).
EXPERTS = [
    ("qwen3_moe", "Qwen3MoeExperts", {}),
    ("mixtral", "MixtralExperts", {}),
    (
        "gpt_oss",
        "GptOssExperts",
        {"activation": "swiglu_oai", "interleaved": True, "limit": 7.0},
    ),
]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("kind", "name", "given"), EXPERTS, ids=[e[0] for e in EXPERTS])
def test_experts_compute_what_the_class_of_transformers_computes(
    kind: str, name: str, given: dict, implementation: str
) -> None:
    config = transformers.AutoConfig.for_model(kind, **SMALL)
    config._experts_implementation = implementation
    made = getattr(module_of(kind), name)(config).requires_grad_(False)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape) / 4
    x = torch.randn(13, 64) * 4  # so that GPT-OSS's gate is clamped
    weights, ids = ops.topk_route(torch.randn(13, 16), k=4)
    w13, w2 = made.gate_up_proj, made.down_proj
    biases = ()
    if kind == "gpt_oss":
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        biases = (made.gate_up_proj_bias, made.down_proj_bias)
    actual = ops.moe_experts(x, ids, weights, w13, w2, *biases, **given)
    assert_close(actual, made(x, ids.long(), weights), rtol=1e-5, atol=1e-4)


def by_hand(given: dict, w13: Tensor, w2: Tensor, x: Tensor) -> Tensor:
    """Each token and each of its experts alone, in fp32."""
    out = torch.zeros(len(x), w2.shape[1])
    b13, b2 = given["b13"], given["b2"]
    for t in range(len(x)):
        for weight, e in zip(given["weights"][t].float(), given["ids"][t].tolist(), strict=True):
            if not 0 <= e < len(w13):
                continue
            h = w13[e] @ x[t] + (0 if b13 is None else b13[e])
            gate, up = h.chunk(2)
            y = w2[e] @ (gate * gate.sigmoid() * up) + (0 if b2 is None else b2[e])
            out[t] += weight * y
    return out


def dequantized_block(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    spread = scale.repeat_interleave(block, -2)[..., : codes.shape[-2], :]
    return codes.float() * spread.repeat_interleave(block, -1)[..., : codes.shape[-1]]


def of_fp8(given: dict) -> tuple[Tensor, Tensor, Tensor]:
    block = given.get("block", 0)
    if not block:
        weights = (given[name].float() * given[f"{name}_scale"] for name in ("w13", "w2"))
        return *weights, given["x"].float() * given["x_scale"]
    weights = (dequantized_block(given[n], given[f"{n}_scale"], block) for n in ("w13", "w2"))
    spread = given["x_scale"].repeat_interleave(block, -1)[:, : given["x"].shape[-1]]
    return *weights, given["x"].float() * spread


def of_int4(given: dict) -> tuple[Tensor, Tensor, Tensor]:
    weights = [
        torch.stack(
            [
                int4_weight(given[name][e], given[f"{name}_scale"][e], zeros, given["group"])
                for e, zeros in enumerate(given[f"{name}_zeros"] or [None] * len(given[name]))
            ]
        )
        for name in ("w13", "w2")
    ]
    return *weights, given["x"]


def of_mxfp4(given: dict) -> tuple[Tensor, Tensor, Tensor]:
    weights = (mxfp4_values(given[name], given[f"{name}_scale"]) for name in ("w13", "w2"))
    return *weights, given["x"]


Values = Callable[[dict], tuple[Tensor, Tensor, Tensor]]
FORMATS = {
    "moe_experts": (full, lambda given: (given["w13"], given["w2"], given["x"]), 1e-5),
    "moe_experts_fp8": (fp8, of_fp8, 0.05),
    "moe_experts_fp8 static": (partial(fp8, per="tensor"), of_fp8, 0.05),
    "moe_experts_fp8 blocks": (partial(fp8_block, hidden=256, inner=128), of_fp8, 0.05),
    "moe_experts_int8": (int8, of_fp8, 0.02),
    "moe_experts_w4a16": (partial(int4, inner=64), of_int4, 1e-5),
    "moe_experts_mxfp4": (partial(mxfp4, inner=64), of_mxfp4, 1e-5),
}


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_a_format_are_those_of_the_values_they_stand_for(name: str, bias: bool) -> None:
    make, values, tolerance = FORMATS[name]
    given = make(Draw(torch.float32), tokens=6, bias=bias)
    expected = by_hand(given, *values(given))
    actual = ops.REGISTRY[name.split()[0]].reference(**given)
    assert float((actual - expected).norm() / expected.norm()) < tolerance


def test_the_weight_on_the_input_passes_through_the_gate() -> None:
    given = full(Draw(torch.float32), k=1, tokens=4)
    weights = given.pop("weights")
    inputs = given | {"x": given["x"] * weights, "weights": torch.ones_like(weights)}
    assert_close(
        ops.moe_experts(**given, weights=weights, weight_on_input=True), ops.moe_experts(**inputs)
    )


def test_an_expert_of_another_device_adds_nothing() -> None:
    given = full(Draw(torch.float32), tokens=3)
    given["ids"][:] = torch.tensor([[0, 6], [-1, 7], [1, 2]])
    out = ops.moe_experts(**given)
    assert not out[1].any()
    alone = given | {"ids": given["ids"][:, :1], "weights": given["weights"][:, :1]}
    assert_close(out[0], ops.moe_experts(**alone)[0])
