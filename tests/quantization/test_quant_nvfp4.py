"""Checkpoints in NVFP4: the layouts of compressed-tensors and of ModelOpt, by value, merged and
served.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quant_checkpoints import (
    KEPT,
    Tensors,
    assert_means,
    checkpoint,
    compressed,
    layers,
    refusal,
    tensors,
    write,
)
from tiny_experts import CONFIGS
from torch import Tensor, nn

import atomc
from atomc import LLM, SamplingParams
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.quantization import QuantizedLinear
from atomc.quantization.config import parse
from atomc.quantization.nvfp4 import Nvfp4

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = torch.float8_e4m3fn
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
                "dynamic": False,
            },
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", f"*{KEPT.removeprefix('model')}*"],
}
HF_QUANT_CONFIG = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": MODELOPT["ignore"],
    },
}


def modelopt(weight: Tensor) -> Tensors:
    """A weight as ModelOpt exports it: the factor of all scales is amax / (6 * 448)."""
    groups = weight.float().unflatten(-1, (-1, 16))
    factor = weight.float().abs().max() / (6 * 448)
    scale = (groups.abs().amax(-1) / (6 * factor)).clamp(min=2**-9).to(E4M3)
    wanted = groups / (scale.float() * factor)[..., None]
    nearest = (wanted.abs()[..., None] - torch.tensor(VALUES)).abs().argmin(-1)
    codes = (nearest + 8 * (wanted < 0)).flatten(-2).to(torch.uint8)
    return {
        "weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }


def meant(stored: Tensors) -> Tensor:
    """The values of a weight of ModelOpt, fp32."""
    packed = stored["weight"].int()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])[codes]
    scale = stored["weight_scale"].float().repeat_interleave(16, -1)
    return values * scale * stored["weight_scale_2"]


def reference() -> Tensors:
    """The dequantized weights of the checkpoint in ModelOpt's layout, by layer."""
    return {
        name.removesuffix(".weight"): meant(modelopt(weight))
        for name, weight in tensors().items()
        if name.endswith("_proj.weight") and not name.startswith(KEPT)
    }


@pytest.mark.parametrize("preset", [pytest.param("NVFP4A16", marks=pytest.mark.slow), "NVFP4"])
def test_what_compressed_tensors_wrote_has_the_values_that_it_decompresses(
    preset: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = compressed(tmp_path, preset)
    found = layers(load(tmp_path, progress=False))
    assert set(found) == set(expected) and KEPT not in found
    stored = load_file(tmp_path / "model.safetensors")
    for name, layer in found.items():
        assert layer.weight.equal(stored[f"{name}.weight_packed"]), name
        assert layer.weight_scale.data.view(torch.uint8).equal(
            stored[f"{name}.weight_scale"].view(torch.uint8)
        )
        # The library rounds to bf16, and divides where we multiply by the reciprocal.
        differ = layer.dequantized().bfloat16() != expected[name].bfloat16()
        assert differ.float().mean() < 1e-4, name
    said = "activations keep 16 bits instead of NVFP4 as in the config" in caplog.text
    assert said == (preset == "NVFP4")


@pytest.mark.parametrize("beside", [False, True], ids=["config.json", "hf_quant_config.json"])
def test_what_modelopt_wrote_has_its_values(
    beside: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path, MODELOPT, modelopt)
    if beside:
        (path / "hf_quant_config.json").write_text(json.dumps(HF_QUANT_CONFIG))
        config = json.loads((path / "config.json").read_text())
        del config["quantization_config"]
        (path / "config.json").write_text(json.dumps(config))
    model = load(path, progress=False)
    assert_means(model, reference(), 130.0)
    assert "activations keep 16 bits instead of NVFP4 as in the config" in caplog.text


def test_layers_of_one_input_are_merged_and_each_keeps_its_factor() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate_proj, self.up_proj = nn.Linear(64, 48), nn.Linear(64, 48)
            with torch.no_grad():
                self.up_proj.weight.mul_(37.0)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)

    model = atomc.quantize(Block().requires_grad_(False), "nvfp4_a16")
    gate, up = model.gate_proj, model.up_proj
    assert float(up.global_scale[0] / gate.global_scale[0]) == pytest.approx(37, rel=0.1)
    x = torch.randn(5, 64)
    expected = nn.functional.silu(x @ gate.dequantized().T + gate.bias) * (
        x @ up.dequantized().T + up.bias
    )
    report = atomc.explain(model, x)
    assert [choice.op for choice in report.kernels if "nvfp4" in choice.op] == ["linear_nvfp4"]
    compiled = torch.compile(model, backend="atom", options={"strict": True, "glue": "eager"})
    torch.testing.assert_close(compiled(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.rotating
def test_served_tokens_are_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    coded, plain = tmp_path / "coded", tmp_path / "plain"
    coded.mkdir()
    plain.mkdir()
    checkpoint(coded, MODELOPT, modelopt)
    weights = {name: weight.float() for name, weight in tensors().items()}
    weights |= {f"{name}.weight": values for name, values in reference().items()}
    write(plain, weights, None, dtype="float32")
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[3, 1, 4, 1, 5], list(range(7, 40)), [9]]
    how: Any = {"dtype": "float32", "options": {"glue": "eager"}, "kv_bytes": 2**22}
    served, expected = (
        [list(made.token_ids) for made in LLM(str(path), **how).generate(prompts, greedy)]
        for path in (coded, plain)
    )
    assert served == expected
    assert len({token for tokens in served for token in tokens}) > 5


def test_a_scheme_quantizes_to_the_nearest_codes_and_scales() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    [made] = Nvfp4().quantize([weight])
    expected = modelopt(weight)
    assert made["weight"].equal(expected["weight"])
    assert made["weight_scale"].float().equal(expected["weight_scale"].float())
    assert made["global_scale"].equal(expected["weight_scale_2"].expand(8, 1))


def test_zeros_are_zeros() -> None:
    layer = atomc.quantize(
        nn.Sequential(nn.Linear(32, 4, bias=False))
        .requires_grad_(False)
        .apply(lambda module: [parameter.zero_() for parameter in module.parameters()]),
        "nvfp4_a16",
    )
    assert layer(torch.randn(3, 32)).eq(0).all()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"quant_algo": "NVFP4_AWQ"},
            "modelopt: quant_algo 'NVFP4_AWQ' is not supported, only 'NVFP4' or 'W4A16_NVFP4' or "
            "'FP8'",
        ),
        (
            {"kv_cache_quant_algo": "NVFP4"},
            "modelopt: kv_cache_quant_algo 'NVFP4' is not supported, only None or 'FP8'",
        ),
        ({"group_size": 32}, "modelopt: group_size 32 is not supported, only 16"),
    ],
)
def test_a_config_of_modelopt_that_is_not_supported_is_refused(
    changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as raised:
        parse(MODELOPT | changed)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_cache_quant_algo": "FP8"},
        {"kv_cache_scheme": "FP8"},
        {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
    ],
)
def test_an_fp8_cache_of_modelopt_is_an_fp8_cache(fields: dict[str, Any]) -> None:
    assert parse(MODELOPT | fields).kv_cache_dtype == "fp8"


def test_fp8_of_modelopt_is_static_fp8(tmp_path: Path) -> None:
    def fp8(weight: Tensor) -> Tensors:
        scale = weight.float().abs().max() / 448
        codes = (weight.float() / scale).to(E4M3)
        return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}

    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": MODELOPT["ignore"]}
    model = load(checkpoint(tmp_path, config, fp8), progress=False)
    exact = {name: tensors()[f"{name}.weight"].float() for name in reference()}
    assert_means(model, exact, 28.0)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda stored: stored.pop(f"{Q}.weight_scale_2"),
            f"PATH does not match LlamaForCausalLM: missing {Q}.weight_scale_2. Are config.json and "
            "the weights of the same checkpoint?",
        ),
        (
            lambda stored: stored.update({f"{Q}.weight_scale": torch.ones(256, 16)}),
            f"PATH does not match LlamaForCausalLM: {Q}.weight_scale is F32, expected F8_E4M3. Are "
            "config.json and the weights of the same checkpoint?",
        ),
        (
            lambda stored: stored.update({f"{Q}.weight_scale_2": torch.tensor(-1.0)}),
            f"PATH: {Q}: weight_scale_2 is -1.0, expected a positive number",
        ),
    ],
    ids=["no factor", "scales in fp32", "negative factor"],
)
def test_a_checkpoint_that_contradicts_its_config_is_refused(
    change: Any, sentence: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, MODELOPT, modelopt)
    stored = load_file(path / "model.safetensors")
    change(stored)
    save_file(stored, path / "model.safetensors")
    assert refusal(path) == sentence


def test_a_tied_head_is_not_quantized(tmp_path: Path) -> None:
    stored: Tensors = {}
    for name, weight in tensors().items():
        own = name.removesuffix("weight")
        packed = modelopt(weight) if name.endswith("_proj.weight") else {"weight": weight}
        stored |= {own + key: tensor for key, tensor in packed.items()}
    del stored["lm_head.weight"]
    path = write(tmp_path, stored, MODELOPT | {"ignore": []}, tie_word_embeddings=True)
    model = load(path, progress=False)
    assert type(model.get_submodule("lm_head")) is nn.Linear
    assert isinstance(model.get_submodule(KEPT), QuantizedLinear)


def test_experts_are_refused_by_name() -> None:
    mixtral = create_model(CONFIGS["mixtral"], torch.bfloat16, "cpu").requires_grad_(False)
    with pytest.raises(ValueError) as raised:
        atomc.quantize(mixtral, "nvfp4_a16")
    assert str(raised.value) == (
        "nvfp4_a16: model.layers.0.mlp.experts cannot be nvfp4 (activations 16-bit): no kernel "
        "multiplies experts of NVFP4; add it to `ignore` or choose another scheme"
    )
    atomc.quantize(mixtral, "nvfp4_a16", ignore=["experts"])
    assert isinstance(mixtral.model.layers[0].self_attn.q_proj, QuantizedLinear)
