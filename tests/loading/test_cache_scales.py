"""Keys and values in fp8: scales of a checkpoint are read, and whatever runs, caches hold
numbers / scale.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases.attention import paged
from kernel_cases.draw import Draw
from rewriting import explained
from safetensors.torch import save_file
from test_blockers import QK_PAGED, ROPE_PAGED, qk_attention, rope_attention
from torch import Tensor, nn

from atomc import LLM, SamplingParams, kernels, ops, program
from atomc.loading.cache_scales import cache_scales, mark_fp8_state, set_cache_scale
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.ops.op import refusal
from atomc.platform import Platform

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
# An unquantized checkpoint that asks for a cache in fp8, as llm-compressor writes one that has
# other layers quantized.
KV = {"num_bits": 8, "type": "float", "strategy": "tensor"}
ASKS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["re:.*"],
    "kv_cache_scheme": KV,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": KV | {"symmetric": True},
            "input_activations": KV | {"symmetric": True, "dynamic": False},
        }
    },
}
ATTENTION = "model.layers.{}.self_attn."
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def checkpoint(path: Path, scales: dict[str, Tensor], **differs: Any) -> Path:
    torch.manual_seed(0)
    weights = {
        name: weight.detach()
        for name, weight in create_model(CONFIG, torch.float32).named_parameters()
    }
    (path / "config.json").write_text(json.dumps(CONFIG | differs))
    save_file(weights | scales, path / "model.safetensors")
    return path


def scales_of(model: nn.Module, layer: int) -> tuple[float, float]:
    attention: Any = model.get_submodule(ATTENTION.format(layer).rstrip("."))
    return float(attention.k_scale), float(attention.v_scale)


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)], ids=str
)
def test_scales_are_read_under_each_of_their_names(names: tuple[str, ...], tmp_path: Path) -> None:
    stored = {
        ATTENTION.format(layer) + name: torch.tensor([0.25 * (1 + layer + i)])
        for layer in range(2)
        for i, name in enumerate(names)
    }
    model = load(checkpoint(tmp_path, stored), progress=False)
    for layer in range(2):
        first = 0.25 * (1 + layer)
        assert scales_of(model, layer) == (
            (first, first + 0.25) if len(names) == 2 else (first, first)
        )


def test_a_latent_cache_gets_the_one_scale_of_its_rows() -> None:
    model, scale = nn.Module(), torch.tensor([0.25])
    model.self_attn = nn.Module()
    model.self_attn.kv = ops.latent_state(6, 2)
    for stored, buffers in {
        "k_scale": ["kv_scale"],
        "kv_scale": ["kv_scale"],
        "v_scale": [],
    }.items():
        name = f"self_attn.{stored}"
        model.self_attn._buffers.pop("kv_scale", None)
        set_cache_scale(cache_scales(model, [name])[name], name, scale)
        assert [key for key, _ in model.self_attn.named_buffers() if key != "kv"] == buffers


@pytest.mark.parametrize(
    "wrong", [torch.tensor([0.0]), torch.tensor([1.0, 2.0]), torch.tensor([float("nan")])], ids=str
)
def test_a_scale_that_is_none_is_refused_by_name(wrong: Tensor, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {ATTENTION.format(1) + "k_scale": wrong})
    with pytest.raises(
        ValueError,
        match=r"model\.layers\.1\.self_attn\.k_scale is \[.*, expected one positive number",
    ):
        load(path, progress=False)


def test_scales_of_queries_and_of_layers_that_are_not_there_are_skipped(tmp_path: Path) -> None:
    stored = {
        ATTENTION.format(0) + "q_scale": torch.ones(1),
        ATTENTION.format(7) + "k_scale": torch.ones(1),
    }
    model = load(checkpoint(tmp_path, stored), progress=False)
    assert not [name for name, _ in model.named_buffers() if name.endswith("_scale")]


def test_a_checkpoint_that_asks_for_it_gets_its_cache_in_fp8(tmp_path: Path) -> None:
    stored = {
        ATTENTION.format(layer) + f"{kind}_scale": torch.tensor([0.01])
        for layer in range(2)
        for kind in "kv"
    }
    model = load(checkpoint(tmp_path, stored, quantization_config=ASKS), progress=False)
    compiled = program.compile_model(model, {"strict": True, "glue": "eager"})
    assert [tensor.dtype for spec in compiled.specs for tensor in spec.tensors] == [
        torch.float8_e4m3fn
    ] * 4
    assert compiled.report.matches["rope_kv_write[fp8]"] == 2


@pytest.mark.rotating
def test_the_runtime_computes_with_the_scales_of_each_layer() -> None:
    """A weight of the keys a thousand times as large would saturate without its scale; with it
    nothing changes.
    """
    torch.manual_seed(0)
    model = create_model(CONFIG, torch.float32).eval().requires_grad_(False)
    plain = (
        LLM(model, max_model_len=32, options={"glue": "eager"})
        .generate([[3, 1, 4, 1, 5]], GREEDY)[0]
        .token_ids
    )
    mark_fp8_state(model)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.k_proj.weight.mul_(1000.0), attention.q_proj.weight.div_(1000.0)
        attention.register_buffer("k_scale", torch.tensor([4.0]))
        attention.register_buffer("v_scale", torch.tensor([0.01]))
    llm = LLM(model, max_model_len=32, options={"glue": "eager"})
    assert {tensor.dtype for spec in llm.program.specs for tensor in spec.tensors} == {
        torch.float8_e4m3fn
    }
    assert llm.generate([[3, 1, 4, 1, 5]], GREEDY)[0].token_ids == plain


@pytest.mark.parametrize(
    ("name", "function", "inputs"),
    [
        ("rope_kv_write", rope_attention(), ROPE_PAGED),
        ("qk_norm_rope_kv_write", qk_attention(), QK_PAGED),
    ],
)
def test_the_write_into_a_cache_in_fp8_is_the_same_op_counted_by_scheme(
    name: str, function: Any, inputs: Any
) -> None:
    report = explained(function, *inputs, paged=True, kv_cache_dtype="fp8", tolerance=0.2)
    assert report.matches[name] == report.matches[f"{name}[fp8]"] == report.num_ops[name] == 1
    assert "kv_write" not in report.num_ops and report.near == []


def test_a_gpu_is_served_by_triton_and_a_cpu_by_a_paged_cache() -> None:
    pytest.importorskip("triton")
    for provider in ("triton", "torch"):
        assert kernels.load(provider) is None
    arguments = paged(Draw(torch.bfloat16), [(1, 5)], cache=torch.float8_e4m3fn) | {
        "k_scale": torch.ones(1)
    }
    found = {
        (k.provider, k.layout): refusal(k, Platform.named(where), arguments)
        for k in ops.paged_attention.kernels
        for where in ["h200" if k.provider == "triton" else "cpu"]
        if k.provider in ("triton", "torch")
    }
    assert found["triton", "paged"] is None and found["torch", "paged"] is None
    assert found["torch", "contiguous"].code == "dtype"
