"""Models of latent attention: how they are served, and DeepSeek-V3's checkpoints. What they have
in common with other mixtures of experts is tested in tests/models/test_moe_models.py.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_models import IDS, hf_logits
from test_moe_models import EAGER, KINDS, POSITIONS, theirs, theirs_of
from test_quant_experts_checkpoints import LLM_NAMES, per_expert, scheme_tensors
from tiny_experts import sqnr
from torch import Tensor, nn

from atomc import models
from atomc.loading.cache_scales import cache_scales
from atomc.loading.loader import load
from atomc.quantization import QuantizedExperts
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

NAMES = ("deepseek_v2", "deepseek_v3", "deepseek_v3, no q_lora", "glm4_moe_lite")


def prompts_of(count: int, longest: int, common: int = 0) -> list[list[int]]:
    """Prompts of random lengths, behind as many tokens that all of them begin with."""
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 96, (common,), generator=generator).tolist()
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [prefix + torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def generated(model: nn.Module, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers generates greedily."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def served(
    model: nn.Module, prompts: list[list[int]], count: int, **settings: object
) -> tuple[list[list[int]], int]:
    """What the runtime generates greedily, and how many tokens of prompts the prefix cache had."""
    settings = {"options": EAGER, "max_num_seqs": 8, "max_model_len": 96} | settings
    llm = LLM(model, progress=False, **settings)
    # The first one alone, so that its blocks are in the prefix cache.
    made = llm.generate(prompts[:1], SamplingParams(max_tokens=count))
    made += llm.generate(prompts[1:], SamplingParams(max_tokens=count))
    return [list(each.token_ids) for each in made], sum(each.num_cached for each in made)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_class_has_handles_as_wide_as_its_keys(name: str) -> None:
    model = wrap_stock(theirs(name))
    handles = [buffer for path, buffer in model.named_buffers() if path.endswith(".kv")]
    assert [tuple(handle.shape) for handle in handles] == [(0, 4, 24)] * 2


def test_a_stored_scale_of_keys_is_that_of_keys_or_of_latents_as_either_may_be_cached() -> None:
    model = wrap_stock(theirs("deepseek_v3"))
    layer = "hf_model.model.layers.1.self_attn"
    found = cache_scales(model, [f"{layer}.k_scale", f"{layer}.v_scale"])
    assert [scale.buffers for scale in found.values()] == [("k_scale", "kv_scale"), ("v_scale",)]


CHUNKS = {"max_num_batched_tokens": 7}
SETTINGS = [
    (whose, name, settings)
    for whose in ("ours", "stock")
    for name in NAMES
    for settings in (
        CHUNKS,
        {"enable_prefix_caching": False},
        {"options": EAGER | {"layout": "contiguous", "passes": {"mla_attention": False}}},
    )
]
FAST = [("ours", "deepseek_v3", CHUNKS), ("stock", "deepseek_v2", CHUNKS)]


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("whose", "name", "settings"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in SETTINGS],
    ids=str,
)
def test_chunks_ragged_batches_and_a_shared_prefix_give_the_text_that_transformers_generates(
    whose: str, name: str, settings: dict[str, object], tmp_path: Path
) -> None:
    model, prompts = theirs(name), prompts_of(6, 24, common=35)
    expected = generated(model, prompts, 12)
    if whose == "ours":
        model.save_pretrained(tmp_path)
        model = load(tmp_path)
    made, num_cached = served(model, prompts, 12, **settings)
    assert made == expected
    shares = settings == CHUNKS
    assert num_cached == (5 * 32 if shares else 0)


WIDE = {"intermediate_size": 128, "moe_intermediate_size": 128, "kv_lora_rank": 136}
FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj")


def hub_checkpoint(path: Path, name: str = "deepseek_v3") -> dict[str, Tensor]:
    """A checkpoint as DeepSeek publishes it: experts one by one, fp8 in blocks of 128, and a draft
    layer behind the last one. Returns the weights of the model.
    """
    model_type, differs = KINDS[name]
    model = theirs_of(model_type, **differs | WIDE)
    weights = {name: tensor.data for name, tensor in model.state_dict().items()}
    draft = {
        name.replace(".layers.1.", ".layers.2."): tensor.clone()
        for name, tensor in weights.items()
        if ".layers.1." in name
    }
    draft |= {
        f"model.layers.2.{name}.weight": torch.zeros(64, 64)
        for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.head")
    }
    in_blocks = scheme_tensors("fp8_block", weight_scale="weight_scale_inv")
    stored = {}
    for name, weight in per_expert(weights | draft, in_blocks, LLM_NAMES).items():
        kept = weight.dim() != 2 or name.endswith("_scale_inv") or any(x in name for x in KEPT)
        parts = {"weight": weight} if kept else in_blocks(weight)
        owner, _, leaf = name.rpartition(".")
        stored |= {f"{owner}.{leaf if kept else key}": part for key, part in parts.items()}
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "quantization_config": FP8_BLOCK,
        "dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: x.contiguous() for name, x in stored.items()}, path / "model.safetensors")
    return weights


# tests/quantization/test_mla_quantized.py serves such a checkpoint of a stock class.
@pytest.mark.rotating
@pytest.mark.parametrize(
    "stock",
    [pytest.param(False, id="ours"), pytest.param(True, id="stock", marks=pytest.mark.slow)],
)
def test_a_checkpoint_in_blocks_of_fp8_is_loaded_without_its_draft_layer(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = hub_checkpoint(tmp_path)
    if stock:
        monkeypatch.setattr(models, "REGISTRY", {})
    with caplog.at_level(logging.INFO, "atomc"):
        model = load(tmp_path, progress=False)

    [line] = [each for each in caplog.messages if "skipped" in each]
    prefix = "hf_model." if stock else ""
    assert f"skipped {prefix}model.layers.2." in line and "not part of" in line
    inner = model.hf_model if stock else model
    quantized = {
        name.removeprefix("model.layers.1.self_attn.")
        for name, layer in inner.named_modules()
        if isinstance(layer, QuantizedLinear) and ".layers.1.self_attn." in name
    }
    assert quantized == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    for name, layer in inner.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert sqnr(weights[f"{name}.weight"], layer.dequantized()) > 28, name
        elif isinstance(layer, QuantizedExperts):
            for part in ("gate_up_proj", "down_proj"):
                assert sqnr(weights[f"{name}.{part}"], layer.dequantized(part)) > 28, name
    plain = theirs_of("deepseek_v3", **KINDS["deepseek_v3"][1] | WIDE)
    with torch.no_grad():
        found = model(IDS, POSITIONS)
    assert sqnr(hf_logits(plain, IDS, POSITIONS), found) > 8
    made, _ = served(model, prompts_of(3, 9), 4)
    assert [len(tokens) for tokens in made] == [4] * 3
