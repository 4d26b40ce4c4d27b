"""Models that transformers loaded quantized: what they hold becomes ours, and is compiled as one
graph.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import since
from test_quant_checkpoints import CONFIG, KEPT, compressed, fp8_blocks, sqnr
from torch import nn

import atomc
from atomc.quantization import QuantizedLinear

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[5, 6, 7, 8]])
SCALED = {
    "W8A8": "scaled_linear_int8",
    "FP8": "scaled_linear_fp8",
    "FP8_DYNAMIC": "scaled_linear_fp8",
    "FP8_BLOCK": "scaled_linear_fp8_block",
    "W4A16": "linear_w4a16",
    "MXFP4A16": "linear_mxfp4",
    "NVFP4A16": "linear_nvfp4",
}


def theirs(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def check(model: Any, reference: dict[str, torch.Tensor], op: str, decibels: float = 40.0) -> None:
    """Every layer means what it meant, and torch.compile makes one graph of the model, with this
    op.
    """
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)
    }
    assert set(layers) == set(reference) and KEPT not in layers
    for name, layer in layers.items():
        assert sqnr(reference[name], layer.dequantized()) > decibels, name
    before = atomc.reports()
    with torch.inference_mode():
        expected = model(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(model, backend="atom", options={"glue": "eager"})
        torch.testing.assert_close(
            compiled(input_ids=IDS, use_cache=False).logits, expected, rtol=0.05, atol=0.05
        )
    [report] = since(before)
    assert {choice.op for choice in report.kernels} >= {
        op,
        "add_rms_norm" + "_quant" * (op.startswith("scaled")),
    }


@pytest.mark.covering
@pytest.mark.parametrize("preset", SCALED)
def test_what_compressed_tensors_holds_becomes_ours(preset: str, tmp_path: Path) -> None:
    reference = compressed(tmp_path, preset)
    model = theirs(tmp_path)
    assert atomc.adopt(model) is model
    check(
        model, reference, SCALED[preset], 30.0 if preset == "FP8" else 40.0
    )  # one scale now serves what had three


def test_what_transformers_holds_in_blocks_of_fp8_becomes_ours() -> None:
    from transformers.integrations.finegrained_fp8 import FP8Linear

    torch.manual_seed(0)
    model = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).eval()
    )
    reference = {}
    for name, layer in list(model.model.named_modules(prefix="model")):
        if isinstance(layer, nn.Linear) and name != KEPT:
            reference[name] = layer.weight.detach().float()
            made = FP8Linear(layer.in_features, layer.out_features, block_size=(128, 128))
            for key, tensor in fp8_blocks(layer.weight.detach()).items():
                setattr(made, key, nn.Parameter(tensor, requires_grad=False))
            model.set_submodule(name, made)
    model.config.quantization_config = transformers.FineGrainedFP8Config(
        modules_to_not_convert=[KEPT, "lm_head"]
    )
    check(
        atomc.adopt(model), reference, "scaled_linear_fp8_block", 25.0
    )  # of e4m3 beside the bf16 that it was made of


def test_a_model_whose_codes_are_gone_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    compressed(tmp_path, "W8A8")
    model = theirs(tmp_path)
    with torch.inference_mode():
        model(input_ids=IDS)
    with pytest.raises(
        ValueError,
        match="layers of LlamaForCausalLM are already unpacked: adopt it before its first",
    ):
        atomc.adopt(model)
    model.config.quantization_config.quantization_config.quantization_status = "compressed"
    with pytest.raises(
        ValueError,
        match=r"q_proj.weight is torch.bfloat16 .*, expected torch.int8 .*before its first",
    ):
        atomc.adopt(model)
    assert not any(isinstance(layer, QuantizedLinear) for layer in model.modules())


def test_what_is_not_ours_to_read_is_refused_by_name() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with pytest.raises(ValueError, match="LlamaForCausalLM is not quantized: pass the scheme"):
        atomc.adopt(model)
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(
        ValueError,
        match="quant_method 'bitsandbytes' are not supported, only fp8, compressed-tensors",
    ):
        atomc.adopt(model)


@pytest.mark.rotating
def test_a_model_that_is_not_taken_over_runs_as_its_library_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compressed(tmp_path, "W4A16")
    with torch.inference_mode(), caplog.at_level(logging.CRITICAL):
        expected = theirs(tmp_path)(input_ids=IDS, use_cache=False).logits
        compiled = torch.compile(theirs(tmp_path), backend="atom", options={"glue": "eager"})
        torch.testing.assert_close(
            compiled(input_ids=IDS, use_cache=False).logits, expected, rtol=0.02, atol=0.02
        )
