"""Each rank reads its part of a checkpoint: what it then holds is that part of the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_quant_checkpoints import AWQ, CONFIG, GPTQ, KEPT, awq, fp8_blocks, gptq, tensors, write
from test_quant_checkpoints import checkpoint as linear_checkpoint
from test_quant_experts_checkpoints import (
    FORMATS,
    GPT_OSS,
    LLM_NAMES,
    WIDE,
    blocks,
    per_expert,
    weights_of,
)
from test_quant_experts_checkpoints import checkpoint as experts_checkpoint
from tiny_experts import random_model, stored
from tiny_experts import write as write_experts
from torch import nn

from atomc import models
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.parallel.division import Division
from atomc.parallel.process_group import Place, TensorParallel
from atomc.parallel.sharding import Sharding

# Two groups of 64 and two blocks of 128 for each of two ranks.
LARGE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_key_value_heads": 4}
SLOW = pytest.mark.slow
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [KEPT],
}


def rank(index: int, size: int = 2) -> TensorParallel:
    return TensorParallel(index, size, "ranks")


def held(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict(keep_vars=False))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_parts(path: Path, size: int = 2, *, ep: bool = False, **how: Any) -> nn.Module:
    """Each rank's load has the parts of the whole model; returns the last one's."""
    for index in range(size):
        whole, part = (
            load(path, progress=False, **how),
            load(path, progress=False, division=Division(Place(rank(index, size)), ep), **how),
        )
        sharding = Sharding.of(whole, rank(index, size), ep=ep)
        before = sum(weight.nbytes for weight in whole.parameters())
        sharding.cut()
        sharding.connect()
        expected, found = held(whole), held(part)
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert torch.equal(bits(found[name]), bits(tensor)), name
        assert sum(weight.nbytes for weight in part.parameters()) < before * 0.75
        sizes = [
            {name: getattr(layer, name, None) for name in ("in_features", "out_features", "spec")}
            for layer in (*whole.modules(), *part.modules())
        ]
        assert sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :]
    return part


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=SLOW)], ids=["tied", ""])
def test_a_rank_reads_its_part(
    stock: bool, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tensors()
    if tied:
        del stored["lm_head.weight"]
    write(tmp_path, stored, None, tie_word_embeddings=tied)
    monkeypatch.setattr(models, "REGISTRY", {} if stock else models.REGISTRY)
    assert_parts(tmp_path)


@pytest.mark.parametrize("size", [4, pytest.param(3, marks=SLOW)])
def test_a_vocabulary_is_padded_and_heads_of_keys_are_held_by_several(
    size: int, tmp_path: Path
) -> None:
    config = CONFIG | {"vocab_size": 49, "num_attention_heads": 12, "head_dim": 16}
    config |= {"num_key_value_heads": 1}
    torch.manual_seed(0)
    model = create_model(config, torch.bfloat16)
    stored = {name: weight.detach() for name, weight in model.named_parameters()}
    write(tmp_path, stored, None, **{k: v for k, v in config.items() if CONFIG.get(k) != v})
    part = assert_parts(tmp_path, size)
    assert part.model.layers[0].self_attn.k_proj.weight.shape == (16, 256)
    assert part.lm_head.weight.shape == (-(-49 // size), 256)


@pytest.mark.parametrize(
    ("quantization", "packed"),
    [
        pytest.param(FP8, lambda weight: fp8_blocks(weight), id="fp8 blocks"),
        pytest.param(GPTQ, gptq, id="gptq", marks=SLOW),
        pytest.param(AWQ, awq, id="awq", marks=SLOW),
    ],
)
def test_scales_are_cut_with_their_blocks(
    quantization: dict[str, Any],
    packed: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import test_quant_checkpoints

    monkeypatch.setattr(test_quant_checkpoints, "CONFIG", CONFIG | LARGE)
    assert_parts(linear_checkpoint(tmp_path, quantization, packed))


@pytest.mark.parametrize("ep", [False, True], ids=["by width", "by expert"])
@pytest.mark.parametrize(
    "name",
    [name if name == "int4 with zeros" else pytest.param(name, marks=SLOW) for name in FORMATS],
)
def test_stored_experts_are_read_in_parts(
    name: str, ep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"moe_intermediate_size": 256, "intermediate_size": 256}
    import test_quant_experts_checkpoints

    monkeypatch.setattr(test_quant_experts_checkpoints, "WIDE", wide)
    assert_parts(experts_checkpoint(tmp_path, name), ep=ep)


@pytest.mark.parametrize("ep", [False, True], ids=["by width", "by expert"])
@pytest.mark.parametrize("kind", ["transposed", "one by one"])
def test_unquantized_experts_are_read_in_parts(kind: str, ep: bool, tmp_path: Path) -> None:
    if kind == "transposed":
        write_experts(tmp_path, "gpt_oss", stored(random_model("gpt_oss")))
    else:
        weights = per_expert(weights_of("qwen3_moe"), lambda weight: {"weight": weight}, LLM_NAMES)
        write_experts(tmp_path, "qwen3_moe", weights, **WIDE)
    assert_parts(tmp_path, ep=ep)


@pytest.mark.parametrize("ep", [False, True], ids=["by width", "by expert"])
def test_stacked_experts_are_read_in_parts(ep: bool, tmp_path: Path) -> None:
    write_experts(tmp_path, "gpt_oss", blocks(weights_of("gpt_oss")), GPT_OSS, **WIDE)
    assert_parts(tmp_path, ep=ep)
