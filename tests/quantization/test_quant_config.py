"""Configs of quantized checkpoints: which layers they mean, and the sentence for each that cannot
be loaded.
"""

from typing import Any

import pytest
import torch
from torch import nn

from atomc.quantization.config import QuantizationConfig, matches, online, parse
from atomc.quantization.scheme import Fp8, Fp8Block, Int4, Int8, Mxfp4, Scheme

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
INT8_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
INT4 = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "dynamic": False,
}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8_INPUTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


def compressed(
    form: str, weights: dict[str, Any] | None, inputs: dict[str, Any] | None = None, **more: Any
) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def scheme(config: QuantizationConfig, name: str = "model.layers.0.mlp.up_proj") -> Scheme | None:
    with torch.device("meta"):
        method = config.get_quant_method(nn.Linear(256, 256), name)
    return method.scheme if method else None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Fp8Block()),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Fp8("tensor", "static")),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, Fp8("tensor", "token")),
        (compressed("int-quantized", INT8, INT8_INPUTS), Int8()),
        (compressed("pack-quantized", INT4), Int4(128)),
        (
            compressed("pack-quantized", INT4 | {"group_size": 32, "symmetric": False}),
            Int4(32, zeros=True),
        ),
        (compressed("pack-quantized", INT4 | {"actorder": "weight"}), Int4(128)),
        (compressed("float-quantized", FP8, FP8_INPUTS), Fp8("channel", "token")),
        (
            compressed(
                "float-quantized",
                FP8 | {"strategy": "tensor"},
                FP8_INPUTS | {"strategy": "tensor", "dynamic": False},
            ),
            Fp8("tensor", "static"),
        ),
        (
            compressed(
                "float-quantized",
                FP8 | {"strategy": "block", "block_structure": [128, 128]},
                FP8_INPUTS | {"strategy": "group", "group_size": 128},
            ),
            Fp8Block(),
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, Int4(32)),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False},
            Int4(128, zeros=True),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
            Int4(64, zeros=True),
        ),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": False}, Int4(64)),
        ({"quant_method": "quark", "global_quant_config": {"weight": FP4}}, Mxfp4("16-bit")),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": FP4, "input_tensors": FP4 | {"is_dynamic": True}},
            },
            Mxfp4("mxfp4"),
        ),
        ({"quant_method": "mxfp4"}, None),
    ],
)
def test_what_a_config_means(config: dict[str, Any], expected: Scheme | None) -> None:
    parsed = parse(config)
    assert scheme(parsed) == expected
    assert not parsed.online


WHERE = "compressed-tensors: config_groups.group_0"


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"quant_method": "aqlm"},
            "quantized weights of quant_method 'aqlm' are not supported, only fp8, "
            "compressed-tensors, gptq, awq, mxfp4, quark, modelopt",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 128]},
            "fp8: weight_block_size [64, 128] is not supported, only [128, 128] or none",
        ),
        (
            {"quant_method": "fp8", "fmt": "e5m2"},
            "fp8: fmt 'e5m2' is not supported, only 'e4m3' or 'float8_e4m3fn'",
        ),
        (
            compressed("pack-quantized", INT4 | {"group_size": 16}),
            f"{WHERE}.weights: group_size 16 is not supported, only 32 or 64 or 128",
        ),
        (
            compressed("pack-quantized", INT4 | {"num_bits": 8}),
            f"{WHERE}.weights: num_bits 8 is not supported, only 4",
        ),
        (
            compressed("pack-quantized", INT4 | {"actorder": "group"}),
            f"{WHERE}.weights: actorder 'group' is not supported, only False or 'weight' or "
            "'static'",
        ),
        (
            compressed("pack-quantized", INT4, INT8_INPUTS),
            f"{WHERE}.input_activations are not supported with 'pack-quantized', only null",
        ),
        (
            compressed("int-quantized", INT8 | {"symmetric": False}, INT8_INPUTS),
            f"{WHERE}.weights: symmetric False is not supported, only True",
        ),
        (
            compressed("int-quantized", INT8 | {"strategy": "tensor"}, INT8_INPUTS),
            f"{WHERE}.weights: strategy 'tensor' is not supported, only 'channel'",
        ),
        (
            compressed("int-quantized", INT8, INT8_INPUTS | {"dynamic": False}),
            f"{WHERE}.input_activations: dynamic False is not supported, only True",
        ),
        (
            compressed("int-quantized", INT8, INT8_INPUTS | {"symmetric": False}),
            f"{WHERE}.input_activations: symmetric False is not supported, only True",
        ),
        (
            compressed("int-quantized", INT8),
            f"{WHERE}.input_activations is missing: int8 weights with 16-bit "
            "activations are not supported, only with int8 ones",
        ),
        (
            compressed("marlin-24", INT4),
            f"{WHERE}.format 'marlin-24' is not supported, only pack-quantized, int-quantized, "
            "float-quantized, naive-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized",
        ),
        (
            compressed(
                "float-quantized",
                FP8 | {"strategy": "block", "block_structure": [64, 64]},
                FP8_INPUTS,
            ),
            f"{WHERE}.weights.block_structure [64, 64] is not supported, only [128, 128]",
        ),
        (compressed("int-quantized", None), f"{WHERE} has no weights"),
        (
            compressed(
                "int-quantized", INT8, INT8_INPUTS, sparsity_config={"format": "sparse-24-bitmask"}
            ),
            "compressed-tensors: sparsity_config.format 'sparse-24-bitmask' is not supported, "
            "only 'dense'",
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": 128},
            "gptq: bits 8 is not supported, only 4",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            "gptq: group_size -1 is not supported, only 32 or 64 or 128",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            "gptq: desc_act True (activation order) is not supported, only False: the weights "
            "of a group are not adjacent",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMV"},
            "awq: version 'gemv' is not supported, only 'gemm'",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": FP4 | {"dtype": "int4"}}},
            "quark: global_quant_config.weight: dtype 'int4' is not supported, only 'fp4'",
        ),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": FP4},
                "layer_quant_config": {"a": {}},
            },
            "quark: layer_quant_config is not supported, only one setting for all layers "
            "(global_quant_config)",
        ),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused_in_a_sentence(
    config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError) as raised:
        parse(config)
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("pattern", "name", "means"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("mlp.up_proj", "model.layers.1.mlp.up_proj", True),
        ("up_proj", "model.layers.1.mlp.gate_up_proj", False),
        ("re:.*layers\\.[02]\\..*", "model.layers.2.mlp.up_proj", True),
        ("re:.*layers\\.[02]\\..*", "model.layers.1.mlp.up_proj", False),
        ("re:up_proj", "model.layers.1.mlp.up_proj", False),
        ("*lm_head", "language_model.lm_head", True),
        ("*.mlp.*", "model.layers.1.self_attn.q_proj", False),
        ("self_attn.qkv_proj", "model.layers.1.self_attn.k_proj", True),
        ("self_attn.qkv_proj", "model.layers.1.self_attn.o_proj", False),
        ("re:.*gate_up_proj", "model.layers.1.mlp.gate_proj", True),
        ("gate_up_proj", "model.layers.1.mlp.down_proj", False),
        ("re:.*up_proj", "model.layers.1.mlp.gate_proj", False),
    ],
)
def test_which_layers_a_pattern_means(pattern: str, name: str, means: bool) -> None:
    assert matches(pattern, name) == means


def test_the_first_group_that_means_a_layer_decides() -> None:
    groups = {
        "a": {
            "targets": ["re:.*down_proj"],
            "weights": FP8,
            "input_activations": FP8_INPUTS,
            "format": "float-quantized",
        },
        "b": {
            "targets": ["Linear"],
            "weights": INT8,
            "input_activations": INT8_INPUTS,
            "format": "int-quantized",
        },
    }
    config = parse(
        {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*up_proj"]}
    )
    assert scheme(config, "model.layers.0.mlp.down_proj") == Fp8("channel", "token")
    assert scheme(config, "model.layers.0.mlp.gate_proj") == Int8()
    assert scheme(config, "model.layers.0.mlp.up_proj") is None


def test_a_head_is_kept_unless_the_config_means_it() -> None:
    assert scheme(online("fp8"), "lm_head") is None
    assert scheme(parse({"quant_method": "fp8"}), "lm_head") is None
    assert (
        scheme(parse(compressed("int-quantized", INT8, INT8_INPUTS, ignore=[])), "lm_head")
        == Int8()
    )


def test_an_fp8_cache_is_asked_for_by_the_config() -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    assert (
        parse(compressed("int-quantized", INT8, INT8_INPUTS, kv_cache_scheme=kv)).kv_cache_dtype
        == "fp8"
    )
    with pytest.raises(
        ValueError,
        match="kv_cache_scheme of 4 bits, type 'float', strategy 'tensor' is not supported",
    ):
        parse(compressed("int-quantized", INT8, INT8_INPUTS, kv_cache_scheme=kv | {"num_bits": 4}))
