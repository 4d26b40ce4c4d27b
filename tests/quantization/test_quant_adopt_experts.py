"""Mixtures whose experts transformers holds quantized: what `adopt` takes over and what it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_experts import CONFIGS, IDS, sqnr
from torch import Tensor, nn

import atomc
from atomc.quantization import ONLINE, QuantizedExperts
from atomc.quantization.scheme import Fp8
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

KEPT = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "gate"]
E8M0 = torch.float8_e8m0fnu
WIDE = {"moe_intermediate_size": 128, "intermediate_size": 128}
PROJECTIONS = ("gate_up_proj", "down_proj")


def plain(kind: str = "qwen3_moe", **differs: object) -> Any:
    """A model of transformers with random weights that is not quantized."""
    torch.manual_seed(0)
    given = {name: x for name, x in CONFIGS[kind].items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **(given | WIDE | differs))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.requires_grad_(False).eval()


def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    [made] = ONLINE["fp8_block"].quantize([weight])
    return made["weight"], made["weight_scale"]


def powers_of_two(weight: Tensor) -> tuple[Tensor, Tensor]:
    """In blocks, with scales rounded up to powers of two."""
    _, scale = blocks(weight)
    scale = scale.log2().ceil().exp2()
    rows = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight.float() / rows).to(torch.float8_e4m3fn), scale.to(E8M0)


def one_scale(weight: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    made = [ONLINE["fp8"].quantize([part])[0] for part in weight.chunk(parts)]
    return torch.cat([x["weight"] for x in made]), torch.stack([x["weight_scale"] for x in made])


# The settings of transformers, and how an expert's projection of 1 or 2 parts is stored.
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor, int], tuple[Tensor, Tensor]]]] = {
    "blocks": ({"weight_block_size": (128, 128)}, lambda weight, _: blocks(weight)),
    "powers of two": (
        {"weight_block_size": (128, 128), "scale_fmt": "ue8m0"},
        lambda weight, _: powers_of_two(weight),
    ),
    "one scale": ({"weight_block_size": None}, one_scale),
    "static": ({"weight_block_size": None, "activation_scheme": "static"}, one_scale),
}


def quantized(model: Any, name: str) -> Any:
    """A copy whose experts transformers has replaced by its FP8Experts, with the model's values."""
    settings, stored = FORMATS[name]
    made = copy.deepcopy(model)
    made.config.quantization_config = transformers.FineGrainedFP8Config(
        modules_to_not_convert=KEPT, **settings
    )
    fp8.replace_with_fp8_linear(made, KEPT, made.config.quantization_config)
    for path, layer in made.named_modules():
        if not isinstance(layer, fp8.FP8Experts):
            continue
        for projection, parts in zip(PROJECTIONS, (2, 1), strict=True):
            weights = model.get_submodule(path).get_parameter(projection)
            codes, scales = zip(*(stored(weight, parts) for weight in weights), strict=True)
            tensors = {"": torch.stack(codes), "_scale_inv": torch.stack(scales)}
            if name == "static":
                tensors["_activation_scale"] = torch.linspace(0.02, 0.04, len(weights))
            for suffix, tensor in tensors.items():
                old = layer.get_parameter(projection + suffix)
                assert (old.shape, old.dtype) == (tensor.shape, tensor.dtype)
                new = nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(projection + suffix, new)
    return made


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(input_ids=IDS[None], use_cache=False).logits[0]
        return found


@pytest.mark.parametrize("name", FORMATS)
def test_experts_that_transformers_holds_in_fp8_become_ours_without_a_copy(name: str) -> None:
    model = plain()
    theirs = quantized(model, name)
    held = {
        (path, projection): layer.get_parameter(projection)
        for path, layer in theirs.named_modules()
        if isinstance(layer, fp8.FP8Experts)
        for projection in PROJECTIONS
    }
    assert atomc.adopt(theirs) is theirs
    for (path, projection), codes in held.items():
        layer = theirs.get_submodule(path)
        assert isinstance(layer, QuantizedExperts)
        assert layer.get_parameter(projection).data_ptr() == codes.data_ptr()
        weights = model.get_submodule(path).get_parameter(projection)
        values = layer.dequantized(projection)
        assert sqnr(weights.float(), values) > 28
        weights.data.copy_(values)  # what transformers computes with these values
        if name == "static":
            scale = layer.get_parameter(f"{projection}_input_scale")
            assert scale.tolist() == pytest.approx([0.04])
    assert sqnr(logits(model), logits(theirs)) > 20
    assert len(held) == 4


@pytest.mark.rotating
def test_adopted_experts_are_one_op_in_a_compiled_graph() -> None:
    theirs = atomc.adopt(quantized(plain(), "blocks"))
    expected, before = logits(theirs), atomc.reports()
    compiled = torch.compile(theirs, backend="atom", options={"glue": "eager"})
    torch.testing.assert_close(logits(compiled), expected, rtol=0.05, atol=0.05)
    [report] = [found for found in atomc.reports() if not any(found is old for old in before)]
    assert [choice.op for choice in report.kernels].count("moe_experts_fp8") == 2


def test_a_gate_and_an_up_with_different_scales_keep_them() -> None:
    model = plain()
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.data[:, :128] *= 64  # gate
    theirs = atomc.adopt(quantized(model, "one scale"))
    for found, original in zip(theirs.model.layers, model.model.layers, strict=True):
        experts = found.mlp.experts
        assert experts.method.scheme == Fp8("channel")
        weights, values = original.mlp.experts.gate_up_proj, experts.dequantized("gate_up_proj")
        for part in (slice(0, 128), slice(128, 256)):
            assert sqnr(weights[:, part].float(), values[:, part]) > 28


def test_experts_that_the_config_ignores_stay_as_they_are() -> None:
    model = plain()
    model.config.quantization_config = transformers.FineGrainedFP8Config(
        modules_to_not_convert=[*KEPT, "experts"]
    )
    kinds = [type(layer) for layer in model.modules()]
    assert [type(layer) for layer in atomc.adopt(model).modules()] == kinds


def dequantized() -> Any:
    model = plain()
    model.config.quantization_config = transformers.FineGrainedFP8Config(dequantize=True)
    return model


def in_16_bits() -> Any:
    """As transformers leaves experts of compressed-tensors, whose layers are all linear."""
    model = plain()
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": weights | {"strategy": "token", "dynamic": True},
    }
    model.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    return model


def in_4_bits() -> Any:
    model = plain()
    settings = transformers.FineGrainedFP8Config(modules_to_not_convert=KEPT).to_dict()
    model.config.quantization_config = settings | {"expert_dtype": "fp4"}
    return model


def mxfp4(swizzled: bool) -> Any:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    model = plain("gpt_oss")
    model.config.quantization_config = transformers.Mxfp4Config()
    for layer in model.model.layers:
        experts = module.Mxfp4GptOssExperts(model.config)
        if swizzled:  # a tensor of its kernels' library, as after loading
            del experts.gate_up_proj, experts.down_proj
            experts.gate_up_proj = experts.down_proj = object()
        layer.mlp.experts = experts
    return model


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            dequantized,
            "transformers has dequantized the layers of Qwen3MoeForCausalLM: load the checkpoint",
        ),
        (
            in_16_bits,
            r"layers.0.mlp.experts.gate_up_proj is torch.bfloat16 \[.*\], expected "
            r"torch.float8_e4m3fn \[.*\]: load the checkpoint with atomc",
        ),
        (in_4_bits, "expert_dtype 'fp4' is not supported, only 'fp8'"),
        (
            lambda: mxfp4(swizzled=True),
            r"layers.0.mlp.experts: Mxfp4GptOssExperts has no weights \[E, N, K\], but some in the "
            "layout of its kernels; load the checkpoint with atomc",
        ),
        (
            lambda: mxfp4(swizzled=False),  # in transformers 5.17 [E, N, blocks, bytes]
            r"layers.0.mlp.experts: Mxfp4GptOssExperts (is not one of the classes .*|"
            r"has no weights \[E, N, K\].*); load the",
        ),
    ],
    ids=["dequantized", "16 bits", "4 bits", "mxfp4", "mxfp4, not loaded"],
)
def test_experts_without_codes_that_atomc_reads_are_refused_in_a_sentence(
    made: Callable[[], Any], sentence: str
) -> None:
    model = made()
    kinds = [type(layer) for layer in model.modules()]
    with pytest.raises(ValueError, match=sentence):
        atomc.adopt(model)
    assert [type(layer) for layer in model.modules()] == kinds


def test_a_wrapped_model_leaves_experts_of_fp8_to_transformers() -> None:

    model = quantized(plain(), "blocks")
    model.config._experts_implementation = "grouped_mm"
    wrapped = wrap_stock(model)
    assert wrapped.hf_model.config._experts_implementation == "grouped_mm"
