"""Quantized checkpoints: written by the libraries that define them, or by hand as they are
described, then loaded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atomc import models
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.ops.formats import e2m1_values, e8m0_values, unpack_e2m1
from atomc.program import compile_model
from atomc.quantization import QuantizedLinear
from atomc.quantization.scheme import ONLINE, Fp8, convert_to_fnuz
from atomc.stock.adapter import StockModel

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
IDS, POSITIONS = torch.tensor([3, 1, 4, 1, 5]), torch.arange(5)
KEPT = "model.layers.1.mlp.down_proj"
Tensors = dict[str, Tensor]


def sqnr(exact: Tensor, other: Tensor) -> float:
    noise = (exact.double() - other.double()).square().mean()
    return float(10 * torch.log10(exact.double().square().mean() / noise))


def tensors() -> Tensors:
    """The weights of a random model, in bf16."""
    torch.manual_seed(0)
    return {
        name: weight.detach()
        for name, weight in create_model(CONFIG, torch.bfloat16).named_parameters()
    }


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight") and not name.startswith(KEPT)


def write(path: Path, stored: Tensors, quantization: dict[str, Any] | None, **differs: Any) -> Path:
    config = CONFIG | ({"quantization_config": quantization} if quantization else {}) | differs
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors"
    )
    return path


def checkpoint(
    path: Path, quantization: dict[str, Any], packed: Callable[[Tensor], Tensors], **differs: Any
) -> Path:
    """Each linear layer but KEPT as `packed` stores it: names without the layer's."""
    stored: Tensors = {}
    for name, weight in tensors().items():
        if is_linear(name):
            own = name.removesuffix("weight")
            stored |= {own + key: tensor for key, tensor in packed(weight).items()}
        else:
            stored[name] = weight
    return write(path, stored, quantization, **differs)


def layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {
        name.removeprefix("hf_model."): layer
        for name, layer in model.named_modules()
        if isinstance(layer, QuantizedLinear)
    }


def assert_means(model: nn.Module, reference: Tensors, decibels: float = 40.0) -> None:
    """Each quantized layer's weight is the reference's, and what is kept is stored as it was."""
    found = layers(model)
    assert set(found) == set(reference) and KEPT not in found
    for name, layer in found.items():
        assert sqnr(reference[name], layer.dequantized()) > decibels, name
    assert (
        type(model.get_submodule("hf_model." * isinstance(model, StockModel) + KEPT)) is nn.Linear
    )
    assert torch.isfinite(model(IDS, POSITIONS)).all()


def refusal(path: Path, **how: Any) -> str:
    with pytest.raises(ValueError) as raised:
        load(path, progress=False, **how)
    text = str(raised.value)
    assert "\n" not in text
    return text.replace(str(path), "PATH")


# compressed-tensors, written by its own library


def compressed(path: Path, preset: str) -> Tensors:
    """Have compressed-tensors write a quantized model of transformers, and read it back: the
    weights that it then has.
    """
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    from compressed_tensors.compressors.model_compressors.model_compressor import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head", f"re:.*{KEPT}"],
        quantization_status="frozen",
    )
    apply_quantization_config(model, config)
    quantized = {
        name: layer for name, layer in model.named_modules() if hasattr(layer, "weight_scale")
    }
    for layer in quantized.values():
        args, weight = layer.quantization_scheme.weights, layer.weight.data.float()
        groups = {
            "tensor": lambda w: w.reshape(1, -1),
            "channel": lambda w: w,
            "group": lambda w, size=args.group_size: w.reshape(len(w), -1, size),
            "tensor_group": lambda w: w.reshape(len(w), -1, 16),
            "block": lambda w: w.reshape(len(w) // 128, 128, -1, 128).transpose(1, 2).flatten(2),
        }[args.strategy](weight)
        whole = None
        if hasattr(layer, "weight_global_scale"):
            whole = generate_gparam(weight.min(), weight.max())
            layer.weight_global_scale.data = whole
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, whole)
        layer.weight_scale.data = scale.reshape(layer.weight_scale.shape).to(
            layer.weight_scale.dtype
        )
        if hasattr(layer, "weight_zero_point"):
            layer.weight_zero_point.data = zero.reshape(layer.weight_zero_point.shape).to(
                layer.weight_zero_point.dtype
            )
        if hasattr(layer, "input_scale"):
            layer.input_scale.data.fill_(0.01)
        if hasattr(layer, "input_global_scale"):
            layer.input_global_scale.data.fill_(100.0)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    written = json.loads(compressor.quantization_config.model_dump_json(exclude_none=True))
    model.save_pretrained(path)
    config_json = json.loads((path / "config.json").read_text())
    config_json["quantization_config"] = written | {"quantization_status": "compressed"}
    (path / "config.json").write_text(json.dumps(config_json))
    compressor.decompress_model(model)
    return {name: layer.weight.data.float() for name, layer in quantized.items()}


PRESETS = ["W8A8", "W4A16", "W4A16_ASYM", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16"]


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_compressed_tensors_wrote_means_what_it_says(
    preset: str, stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = compressed(tmp_path, preset)
    if stock:
        monkeypatch.setattr(models, "REGISTRY", {})
    model = load(tmp_path, progress=False)
    assert isinstance(model, StockModel) == stock
    # Our own rounding again, where one scale now serves what had three.
    assert_means(model, reference, 30.0 if preset == "FP8" else 40.0)


def test_a_layer_of_another_kind_than_the_config_says_is_refused(tmp_path: Path) -> None:
    compressed(tmp_path, "W4A16")
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight_shape"] = torch.tensor([384, 255])
    save_file(stored, tmp_path / "model.safetensors")
    assert refusal(tmp_path) == (
        "PATH: model.layers.0.mlp.up_proj: weight_shape is [384, 255], weight_packed has [384, 256]"
    )


# fp8 as Hugging Face and DeepSeek store it

FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [KEPT],
}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": [KEPT]}


def fp8_blocks(weight: Tensor) -> Tensors:
    [made] = ONLINE["fp8_block"].quantize([weight])
    return {"weight": made["weight"], "weight_scale_inv": made["weight_scale"]}


def fp8_tensor(weight: Tensor) -> Tensors:
    [made] = ONLINE["fp8"].quantize([weight])
    return {"weight": made["weight"], "weight_scale": made["weight_scale"].reshape(())}


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_blocks_of_fp8_mean_what_transformers_says(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    path = checkpoint(tmp_path, FP8_BLOCK, fp8_blocks)
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
    )
    if stock:
        monkeypatch.setattr(models, "REGISTRY", {})
    model = load(path, progress=False)
    found = layers(model)
    assert len(found) == 13
    assert_means(model, {name: theirs.get_submodule(name).weight.data for name in found})


def test_scales_of_layers_with_one_input_become_the_largest_of_them(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, FP8_TENSOR, fp8_tensor)
    stored = load_file(path / "model.safetensors")
    model = load(path, progress=False)
    attention = model.get_submodule("model.layers.0.self_attn")
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    assert q.weight_scale is k.weight_scale is v.weight_scale
    scales = [stored[f"model.layers.0.self_attn.{name}_proj.weight_scale"] for name in "qkv"]
    assert q.weight_scale.item() == max(scales).item()
    assert attention.o_proj.weight_scale is not q.weight_scale
    assert_means(model, {name: tensors()[f"{name}.weight"].float() for name in layers(model)}, 28.0)


def test_a_static_scale_is_read_and_shared_too(tmp_path: Path) -> None:
    scales = iter(torch.linspace(0.01, 0.02, 13))
    path = checkpoint(
        tmp_path,
        FP8_TENSOR | {"activation_scheme": "static"},
        lambda weight: fp8_tensor(weight) | {"input_scale": next(scales).reshape(1)},
    )
    model = load(path, progress=False)
    attention = model.get_submodule("model.layers.0.self_attn")
    assert attention.q_proj.method.scheme == Fp8("tensor", "static")
    assert attention.q_proj.input_scale is attention.v_proj.input_scale
    stored = load_file(path / "model.safetensors")
    largest = max(
        stored[f"model.layers.0.self_attn.{name}_proj.input_scale"].item() for name in "qkv"
    )
    assert attention.q_proj.input_scale.item() == largest


def test_what_is_done_differently_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(checkpoint(tmp_path, FP8_TENSOR, fp8_tensor), progress=False)
    said = "activations have a dynamic scale per row instead of per tensor as in the config"
    assert said in caplog.text
    notes = compile_model(model, {"glue": "eager"}).report.notes
    assert len([note for note in notes if note.startswith(said)]) == 1


def test_e4m3fnuz_means_the_same_values() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    finite = codes.float().isfinite()
    again, scale = convert_to_fnuz(codes, torch.tensor([0.5]))
    assert again.dtype == torch.float8_e4m3fnuz
    assert torch.equal(again.float()[finite] * scale, codes.float()[finite] * 0.5)


def test_layers_beyond_the_last_are_skipped(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, FP8_BLOCK, fp8_blocks, num_hidden_layers=1)
    assert len(layers(load(path, progress=False))) == 7


# GPTQ and AWQ, packed by hand


def grouped(weight: Tensor, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 [N, K], scales and zero points [N, G], as any asymmetric quantizer makes them."""
    groups = weight.float().view(len(weight), -1, size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return codes.flatten(1).int(), scale, zero.int()


def meant(weight: Tensor) -> Tensor:
    codes, scale, zero = grouped(weight)
    return ((codes.view(*scale.shape, -1) - zero[..., None]) * scale[..., None]).flatten(1)


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight neighbours of the last dimension in an int32; at bits 4i lies the one of number
    order[i].
    """
    packed = torch.zeros(*codes.shape[:-1], codes.shape[-1] // 8, dtype=torch.int64)
    for word in range(packed.shape[-1]):
        for i, number in enumerate(order):
            packed[..., word] |= codes[..., 8 * word + number].long() << (4 * i)
    return packed.to(torch.int32)


def gptq(weight: Tensor, less: int = 1, **more: Tensor) -> Tensors:
    codes, scale, zero = grouped(weight)
    return {
        "qweight": words(codes).t(),
        "scales": scale.t().half(),
        "qzeros": words(zero.t() - less & 15),
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // 64,
    } | more


def awq(weight: Tensor) -> Tensors:
    codes, scale, zero = grouped(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(codes.t(), order),
        "scales": scale.t().half(),
        "qzeros": words(zero.t(), order),
    }


GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 64,
    "desc_act": False,
    "sym": False,
    "modules_to_not_convert": [KEPT],
}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 64,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": [KEPT],
}
INT4 = [
    pytest.param(GPTQ, gptq, id="gptq"),
    pytest.param(
        GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, less=0), id="gptq_v2"
    ),
    pytest.param(AWQ, awq, id="awq"),
]


@pytest.mark.parametrize(("quantization", "packed"), INT4)
def test_int4_of_other_orders_means_the_same_values(
    quantization: dict[str, Any], packed: Callable[[Tensor], Tensors], tmp_path: Path
) -> None:
    model = load(checkpoint(tmp_path, quantization, packed, dtype="float16"), progress=False)
    weights = tensors()
    assert_means(model, {name: meant(weights[f"{name}.weight"]) for name in layers(model)}, 100.0)


def test_activation_order_is_refused_also_where_only_the_weights_show_it(tmp_path: Path) -> None:
    shuffled = torch.randperm(384, generator=torch.Generator().manual_seed(0)).int() // 64
    path = checkpoint(
        tmp_path,
        GPTQ,
        lambda weight: gptq(weight, **({"g_idx": shuffled} if weight.shape[1] == 384 else {})),
    )
    assert refusal(path) == (
        "PATH: model.layers.0.mlp.down_proj: g_idx is not in order: activation order "
        "(desc_act) is not supported, "
        "quantize with desc_act=False"
    )


def test_a_symmetric_config_with_other_zero_points_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, GPTQ | {"sym": True}, gptq)
    assert refusal(path).endswith(
        "qzeros has zero points other than 8, but the config is symmetric"
    )


# MXFP4


QUARK = {
    "quant_method": "quark",
    "exclude": ["lm_head", f"*{KEPT}"],
    "global_quant_config": {
        "weight": {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "scale_format": "e8m0",
        },
        "input_tensors": {
            "dtype": "fp4",
            "qscheme": "per_group",
            "group_size": 32,
            "scale_format": "e8m0",
            "is_dynamic": True,
        },
    },
}


def test_mxfp4_of_quark(tmp_path: Path) -> None:
    def packed(weight: Tensor) -> Tensors:
        return ONLINE["mxfp4"].quantize([weight])[0]

    model = load(checkpoint(tmp_path, QUARK, packed), progress=False)
    reference = {}
    for name, weight in tensors().items():
        if is_linear(name):
            made = packed(weight)
            values = e2m1_values(unpack_e2m1(made["weight"])).view(len(weight), -1, 32)
            reference[name.removesuffix(".weight")] = (
                values * e8m0_values(made["weight_scale"])[..., None]
            ).flatten(1)
    assert_means(model, reference, 200.0)


def test_our_mxfp4_means_what_transformers_says_of_gpt_oss() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    ours = (e2m1_values(unpack_e2m1(blocks)) * e8m0_values(scales)[..., None]).flatten(-2)
    assert torch.equal(theirs.transpose(1, 2), ours)


# What does not fit


def without(name: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        stored = load_file(path / "model.safetensors")
        del stored[name]
        save_file(stored, path / "model.safetensors")

    return spoil


def with_tensor(name: str, tensor: Tensor) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        save_file(
            load_file(path / "model.safetensors") | {name: tensor}, path / "model.safetensors"
        )

    return spoil


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (without(f"{UP}.weight_scale_inv"), f"missing {UP}.weight_scale"),
        (without(f"{UP}.weight"), f"missing {UP}.weight."),
        (
            with_tensor(f"{UP}.weight_scale_inv", torch.ones(3, 3)),
            f"{UP}.weight_scale is [3, 3], expected [3, 2]",
        ),
        (
            with_tensor(f"{UP}.weight", torch.ones(384, 256)),
            f"{UP}.weight is F32, expected F8_E4M3",
        ),
        (with_tensor(f"{UP}.qweight", torch.ones(384, 256)), f"unexpected {UP}.qweight"),
        (
            with_tensor(f"{KEPT}.weight", torch.ones(256, 384).to(torch.float8_e4m3fn)),
            f"{KEPT}.weight is F8_E4M3, expected F64 or F32 or F16 or BF16",
        ),
        (truncated, "model.safetensors is damaged or incomplete"),
    ],
    ids=[
        "no scale",
        "no weight",
        "wrong shape",
        "not quantized",
        "another format",
        "quantized",
        "truncated",
    ],
)
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    spoil: Callable[[Path], None],
    sentence: str,
    stock: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = checkpoint(tmp_path, FP8_BLOCK, fp8_blocks)
    spoil(path)
    if stock:
        pytest.importorskip("transformers")
        monkeypatch.setattr(models, "REGISTRY", {})
    assert sentence in refusal(path).replace("hf_model.", "")


# Where the config comes from


def test_a_file_beside_the_weights_counts_more_than_config_json(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"quant_method": "unheard"}, gptq)
    (path / "quantize_config.json").write_text(
        json.dumps({key: GPTQ[key] for key in GPTQ if key != "quant_method"})
    )
    assert len(layers(load(path, progress=False))) == 13


def test_what_the_caller_says_counts_most(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"quant_method": "unheard"}, gptq)
    (path / "quantize_config.json").write_text(json.dumps({"bits": 3}))
    assert len(layers(load(path, progress=False, quantization=GPTQ))) == 13


def test_quantizing_what_is_quantized_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, FP8_BLOCK, fp8_blocks)
    assert refusal(path, quantization="int8") == (
        "PATH is already quantized (fp8), so it cannot be quantized to int8: omit "
        "`quantization`, or use the "
        "original checkpoint"
    )
    assert len(layers(load(path, progress=False, quantization="fp8"))) == 13


def test_a_quantization_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, FP8_BLOCK, fp8_blocks)
    (path / "quant_config.json").write_text("{")
    assert refusal(path).startswith("PATH/quant_config.json is not JSON")
