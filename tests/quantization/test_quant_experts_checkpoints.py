"""Checkpoints with quantized experts, written as their formats describe them, then loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_experts import IDS, POSITIONS, random_model, sqnr, write
from torch import Tensor, nn

from atomc import models
from atomc.loading.loader import load
from atomc.ops.experts import Gate
from atomc.ops.formats import pack_int4
from atomc.quantization import ONLINE, QuantizedExperts, apply
from atomc.quantization.experts import ExpertsMethod
from atomc.quantization.experts_spec import ExpertsSpec
from atomc.quantization.scheme import Fp8, Int4
from atomc.quantization.stored_experts import expect_scales, merge_scales, stack
from atomc.stock.adapter import StockModel

Tensors = dict[str, Tensor]
Packed = Callable[[Tensor], Tensors]
LLM_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# An expert is as wide as a block.
WIDE = {"moe_intermediate_size": 128, "intermediate_size": 128}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(form: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"],
    }


def scheme_tensors(name: str, **renamed: str) -> Packed:
    """As our scheme has them, under other names."""

    def packed(weight: Tensor) -> Tensors:
        [made] = ONLINE[name].quantize([weight])
        return {renamed.get(key, key): tensor for key, tensor in made.items()}

    return packed


def packed_int4(weight: Tensor) -> Tensors:
    """compressed-tensors' int4 in groups of 32 with zero points, which are packed along rows."""
    groups = weight.unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-6) / 15
    zeros = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale + zeros).round().clamp(0, 15).to(torch.int32).flatten(-2)
    packed_zeros = pack_int4(zeros.squeeze(-1).to(torch.int32).t().contiguous())
    return {
        "weight_packed": pack_int4(codes),
        "weight_scale": scale.squeeze(-1),
        "weight_zero_point": packed_zeros.t(),
        "weight_shape": torch.tensor(weight.shape),
    }


def static_fp8(weight: Tensor) -> Tensors:
    made = scheme_tensors("fp8")(weight)
    scales = {"input_scale": weight.abs().max().reshape(()), "weight_scale": made["weight_scale"]}
    return {"weight": made["weight"], **scales}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
QUARK_WEIGHT = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
}
# name -> (quantization_config, the tensors of a projection, decibels that its weights keep)
FORMATS: dict[str, tuple[dict[str, Any], Packed, float]] = {
    "fp8 blocks": (
        {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["self_attn", "re:.*mlp.gate$"],
        },
        scheme_tensors("fp8_block", weight_scale="weight_scale_inv"),
        28,
    ),
    "fp8, one scale": (
        {"quant_method": "fp8", "ignored_layers": ["self_attn", "gate"]},
        scheme_tensors("fp8"),
        28,
    ),
    "fp8 of outputs": (
        compressed(
            "float-quantized", FP8_INPUTS | {"strategy": "channel", "dynamic": False}, FP8_INPUTS
        ),
        scheme_tensors("fp8_per_token"),
        28,
    ),
    "fp8, static": (
        compressed(
            "float-quantized",
            FP8_INPUTS | {"strategy": "tensor", "dynamic": False},
            FP8_INPUTS | {"strategy": "tensor", "dynamic": False},
        ),
        static_fp8,
        28,
    ),
    "int8": (
        compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        ),
        scheme_tensors("int8"),
        38,
    ),
    "int4": (
        compressed("pack-quantized", INT4),
        lambda weight: (
            scheme_tensors("int4", weight="weight_packed")(weight)
            | {"weight_shape": torch.tensor(weight.shape)}
        ),
        18,
    ),
    "int4 with zeros": (compressed("pack-quantized", INT4 | {"symmetric": False}), packed_int4, 20),
    "mxfp4 of Quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": QUARK_WEIGHT},
            "exclude": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate"],
        },
        scheme_tensors("mxfp4_a16"),
        16,
    ),
}


def per_expert(weights: Tensors, packed: Packed, names: dict[str, str]) -> Tensors:
    """With a tensor per expert and projection; gate and up in halves."""
    found: Tensors = {}
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
        if parts is None or weight.dim() != 3:
            found[name] = weight
            continue
        for e, of_expert in enumerate(weight):
            for part, rows in zip(parts, of_expert.chunk(len(parts)), strict=True):
                found |= {
                    f"{owner}.{e}.{names[part]}.{key}": tensor
                    for key, tensor in packed(rows).items()
                }
    return found


def weights_of(kind: str) -> Tensors:
    model = random_model(kind, **WIDE)
    return {name: weight.data for name, weight in model.named_parameters()}


def checkpoint(path: Path, name: str, kind: str = "qwen3_moe") -> Path:
    quantization, packed, _ = FORMATS[name]
    names = MIXTRAL_NAMES if kind == "mixtral" else LLM_NAMES
    return write(path, kind, per_expert(weights_of(kind), packed, names), quantization, **WIDE)


def loaded(path: Path, stock: bool, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Our model, or the class of transformers."""
    with monkeypatch.context() as patched:
        if stock:
            pytest.importorskip("transformers")
            patched.setattr(models, "REGISTRY", {})
        model = load(path, progress=False)
    assert isinstance(model, StockModel) == stock
    return model


def layers(model: nn.Module) -> list[QuantizedExperts]:
    return [layer for _, layer in apply.quantized_experts(model)]


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_stored_one_by_one_mean_their_values(
    name: str, stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "mixtral" if name == "int8" else "qwen3_moe"
    checkpoint(tmp_path, name, kind)
    model = loaded(tmp_path, stock, monkeypatch)
    weights, decibels = weights_of(kind), FORMATS[name][2]
    assert len(layers(model)) == 2
    for i, layer in enumerate(layers(model)):
        for projection in ("gate_up_proj", "down_proj"):
            exact = weights[f"model.layers.{i}.mlp.experts.{projection}"]
            for e, (own, found) in enumerate(
                zip(exact, layer.dequantized(projection), strict=True)
            ):
                assert decibels < sqnr(own, found) < 60, (i, projection, e)
    for path, linear in model.named_modules():
        if "self_attn" in path and path.endswith("_proj"):
            assert type(linear) is nn.Linear
    if name != "fp8, static":  # whose scales are made up
        plain = random_model(kind, **WIDE)
        assert sqnr(plain(IDS, POSITIONS), model(IDS, POSITIONS)) > 8
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_static_scale_is_the_largest_of_all_experts(tmp_path: Path) -> None:
    layer = layers(load(checkpoint(tmp_path, "fp8, static"), progress=False))[0]
    weights = weights_of("qwen3_moe")
    for projection in ("gate_up_proj", "down_proj"):
        largest = weights[f"model.layers.0.mlp.experts.{projection}"].abs().max()
        assert torch.equal(layer.get_parameter(f"{projection}_input_scale"), largest.reshape(1))
    assert layer.method.scheme == Fp8("channel", "static")
    assert layer.gate_up_proj_scale.shape == (4, 256, 1)


def test_blocks_that_stacking_would_cut_are_refused(tmp_path: Path) -> None:
    quantization, packed, _ = FORMATS["fp8 blocks"]
    weights = {n: w.data for n, w in random_model("qwen3_moe").named_parameters()}
    write(tmp_path, "qwen3_moe", per_expert(weights, packed, LLM_NAMES), quantization)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts: experts of width 64 cannot be"):
        load(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        (
            "experts.2.up_proj.weight_scale",
            r"missing .*layers.0.mlp.experts.2.up_proj.weight_scale",
        ),
        ("weight_scale", r"missing .*layers.0.mlp.experts.gate_proj.weight_scale"),
    ],
)
def test_a_missing_scale_is_named(lost: str, sentence: str, tmp_path: Path) -> None:
    quantization, packed, _ = FORMATS["int8"]
    stored = per_expert(weights_of("qwen3_moe"), packed, LLM_NAMES)
    kept = {name: x for name, x in stored.items() if not name.endswith(lost)}
    write(tmp_path, "qwen3_moe", kept, quantization, **WIDE)
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path, progress=False)


# Stacked experts

GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def blocks(weights: Tensors) -> Tensors:
    """As OpenAI publishes GPT-OSS: blocks of 32 codes in 16 bytes, and their scales."""
    found: Tensors = {}
    for name, weight in weights.items():
        if weight.dim() == 3:
            [made] = ONLINE["mxfp4_a16"].quantize([weight.flatten(0, 1)])
            codes = made["weight"].view(*weight.shape[:2], -1, 16)
            scales = made["weight_scale"].view(*weight.shape[:2], -1)
            found |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        else:
            found[name] = weight
    return found


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_gpt_oss_computes_what_transformers_unpacks(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    tensors = blocks(weights_of("gpt_oss"))
    write(tmp_path, "gpt_oss", tensors, GPT_OSS, **WIDE)
    model = loaded(tmp_path, stock, monkeypatch)
    for i, layer in enumerate(layers(model)):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{i}.mlp.experts.{projection}"
            theirs = mxfp4.convert_moe_packed_tensors(
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=torch.float32
            )
            assert torch.equal(theirs.mT, layer.dequantized(projection))
            assert torch.equal(layer.get_parameter(f"{projection}_bias"), tensors[f"{name}_bias"])
    # With unpacked weights, our 16-bit model computes the same.
    plain = random_model("gpt_oss", **WIDE)
    for i, layer in enumerate(layers(model)):
        experts = plain.get_submodule(f"model.layers.{i}.mlp.experts")
        for projection in ("gate_up_proj", "down_proj"):
            experts.get_parameter(projection).data.copy_(layer.dequantized(projection))
    assert sqnr(plain(IDS, POSITIONS), model(IDS, POSITIONS)) > 80


def test_alternating_gates_that_are_stored_apart_are_stacked_in_halves(tmp_path: Path) -> None:
    """GPT-OSS as tools write it that quantize linear layers, with their biases."""
    weights = weights_of("gpt_oss")
    tensors: Tensors = {}
    for name, weight in weights.items():
        owner, _, leaf = name.rpartition(".")
        part, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
        if "experts" not in owner:
            tensors[name] = weight
            continue
        rows = {"down_proj": weight}
        if part == "gate_up_proj":
            rows = {"gate_proj": weight[:, ::2], "up_proj": weight[:, 1::2]}
        for projection, of_all in rows.items():
            for e, own in enumerate(of_all):
                packed = {"bias": own} if kind == "bias" else scheme_tensors("int8")(own)
                tensors |= {f"{owner}.{e}.{projection}.{key}": x for key, x in packed.items()}
    write(tmp_path, "gpt_oss", tensors, FORMATS["int8"][0], **WIDE)
    model = load(tmp_path, progress=False)
    layer = layers(model)[0]
    assert not layer.gate["interleaved"]
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    assert torch.equal(layer.get_parameter("gate_up_proj_bias")[:, :128], weights[name][:, ::2])
    plain = random_model("gpt_oss", **WIDE)
    assert sqnr(plain(IDS, POSITIONS), model(IDS, POSITIONS)) > 25


def test_stacked_fp8_is_read_as_it_is(tmp_path: Path) -> None:
    quantization = FORMATS["fp8 blocks"][0]
    weights = weights_of("qwen3_moe")
    tensors: Tensors = {}
    for name, weight in weights.items():
        if weight.dim() == 3:
            made = [ONLINE["fp8_block"].quantize([own])[0] for own in weight]
            tensors[name] = torch.stack([own["weight"] for own in made])
            tensors[f"{name}_scale_inv"] = torch.stack([own["weight_scale"] for own in made])
        else:
            tensors[name] = weight
    write(tmp_path, "qwen3_moe", tensors, quantization, **WIDE)
    for i, layer in enumerate(layers(load(tmp_path, progress=False))):
        name = f"model.layers.{i}.mlp.experts.gate_up_proj"
        assert torch.equal(layer.gate_up_proj.view(torch.uint8), tensors[name].view(torch.uint8))
        assert sqnr(weights[name], layer.dequantized("gate_up_proj")) > 28


@pytest.mark.parametrize("shape", [(-1, 2, 1), (-1, 2)], ids=str)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_stacked_fp8_with_a_scale_for_gate_and_one_for_up_keeps_all_values(
    static: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weights = weights_of("qwen3_moe")
    tensors: Tensors = {}
    for name, weight in weights.items():
        if weight.dim() != 3:
            tensors[name] = weight
            continue
        parts = weight.chunk(2, 1) if name.endswith("gate_up_proj") else (weight,)
        made = [
            [ONLINE["fp8"].quantize([part])[0] for part in own] for own in zip(*parts, strict=True)
        ]
        tensors[name] = torch.stack([torch.cat([part["weight"] for part in own]) for own in made])
        scales = torch.stack([torch.cat([part["weight_scale"] for part in own]) for own in made])
        tensors[f"{name}_scale_inv"] = scales.view(shape if len(parts) == 2 else (-1, 1, 1))
        if static:
            tensors[f"{name}_activation_scale"] = torch.linspace(0.01, 0.05, len(weight))
    quantization = {"quant_method": "fp8", "ignored_layers": ["self_attn", "gate"]}
    quantization |= {"activation_scheme": "static"} if static else {}
    write(tmp_path, "qwen3_moe", tensors, quantization, **WIDE)
    for i, layer in enumerate(layers(load(tmp_path, progress=False))):
        for projection in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{i}.mlp.experts.{projection}"
            scales = tensors[f"{name}_scale_inv"].flatten(1)
            rows = scales.repeat_interleave(len(weights[name][0]) // scales.shape[1], 1)
            expected = tensors[name].float() * rows.unsqueeze(-1)
            assert torch.equal(layer.dequantized(projection), expected)
            assert sqnr(weights[name], expected) > 28
            if static:  # experts share one, which is as large as theirs
                found = layer.get_parameter(f"{projection}_input_scale").tolist()
                assert found == pytest.approx([0.05])


def test_an_ignored_layer_of_experts_is_read_in_16_bits(tmp_path: Path) -> None:
    quantization, packed, _ = FORMATS["int8"]
    weights = weights_of("qwen3_moe")
    first = {n: w for n, w in weights.items() if ".layers.0.mlp" not in n}
    kept = {n: w for n, w in weights.items() if ".layers.0.mlp" in n}
    ignore = [*quantization["ignore"], "re:model.layers.0.mlp.experts.*"]
    stored = per_expert(first, packed, LLM_NAMES) | kept
    write(tmp_path, "qwen3_moe", stored, quantization | {"ignore": ignore}, **WIDE)
    model = load(tmp_path, progress=False)
    assert [name for name, _ in apply.quantized_experts(model)] == ["model.layers.1.mlp.experts"]


# Stacking, on tensors made by hand


def test_gate_and_up_with_one_scale_each_keep_their_codes() -> None:
    codes = {
        part: torch.full((2, 3, 4), value)
        for part, value in zip("gud", (1.0, 2.0, 4.0), strict=True)
    }
    stored = {
        name: {
            "weight": codes[name[0]].to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor([[scale], [scale * 2]]),
        }
        for name, scale in (("gate_proj", 0.5), ("up_proj", 0.25), ("down_proj", 1.0))
    }
    method, made = stack(ExpertsMethod(Fp8()), stored)
    assert method.scheme == Fp8("channel")
    assert made["gate_up_proj"].float()[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert made["gate_up_proj_scale"][:, :, 0].tolist() == [
        [0.5, 0.5, 0.5, 0.25, 0.25, 0.25],
        [1.0, 1.0, 1.0, 0.5, 0.5, 0.5],
    ]
    assert made["down_proj_scale"].flatten(1).tolist() == [[1, 1, 1], [2, 2, 2]]


def test_scales_of_alternating_gate_and_up_alternate_as_well() -> None:
    gate = Gate(activation="swiglu_oai", interleaved=True, alpha=1.702, limit=7.0)
    layer = QuantizedExperts(ExpertsSpec(2, 4, 3, False, False, gate), ExpertsMethod(Fp8()))
    layer.method.create_weights(layer, torch.bfloat16, "cpu")
    expect_scales(layer, {"gate_up_proj_scale": (2, 2)})
    assert layer.gate_up_proj_scale.shape == (2, 2, 1)
    layer.set("gate_up_proj_scale", torch.tensor([[[0.5], [0.25]], [[1.0], [2.0]]]))
    layer.set("down_proj_scale", torch.tensor([[[3.0]], [[4.0]]]))
    merge_scales(layer)
    assert layer.gate_up_proj_scale.flatten(1).tolist() == [[0.5, 0.25] * 3, [1.0, 2.0] * 3]
    assert layer.down_proj_scale.flatten(1).tolist() == [[3.0] * 4, [4.0] * 4]
    assert layer.method.scheme == Fp8("channel")


def test_biases_and_zeros_are_stacked_with_the_rows() -> None:
    def part(value: int) -> Tensors:
        return {
            "weight": torch.full((2, 3, 8), value, dtype=torch.int32),
            "weight_scale": torch.full((2, 3, 2), float(value)),
            "zeros": torch.full((2, 3, 2), value, dtype=torch.uint8),
            "bias": torch.full((2, 3), float(value)),
        }

    stored = {"gate_proj": part(1), "up_proj": part(2), "down_proj": part(3)}
    _, made = stack(ExpertsMethod(Int4(32, zeros=True)), stored)
    for name in ("gate_up_proj", "gate_up_proj_scale", "gate_up_proj_zeros"):
        assert made[name][1, :, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert made["gate_up_proj_bias"].tolist() == [[1, 1, 1, 2, 2, 2]] * 2
    assert made["down_proj_bias"].tolist() == [[3, 3, 3]] * 2
