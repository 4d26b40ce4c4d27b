"""Latent attention of classes of transformers divided over ranks: heads of each, what their results
sum up to, what is read from a checkpoint, the plan, near misses. No processes: see
tests/parallel/test_tensor_parallel.py and tests/runtime/ranks/test_ranks_models.py.
"""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensor_parallel_ranks import TINY, Case, fill, whole
from test_tensor_parallel import LATENT, LATENT_BLOCKS
from test_tensor_parallel_loading import assert_parts
from torch import Tensor, nn

import atomc
from atomc.loading.create_model import create_model
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.sharding import Sharding
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import plan_step
from atomc.platform import Platform
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

SLOW = pytest.mark.slow
# Keys and values of different widths, so that a cut at the wrong column shows.
SIZES = LATENT | {"v_head_dim": 12, "qk_nope_head_dim": 20}
KINDS = {
    "DeepSeek-V3": Case("deepseek_v3", "stock", SIZES),
    "DeepSeek-V3, in a program": Case("deepseek_v3", "transformers", SIZES),
    "Youtu, queries of no latent": Case("youtu", "stock", SIZES | {"q_lora_rank": None}),
    "DeepSeek-V2, whose plan has the heads": Case("deepseek_v2", "stock", SIZES),
}
X = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
LAYER = "model.layers.0.self_attn"


def rank(index: int = 0, size: int = 2) -> TensorParallel:
    return TensorParallel(index, size, "ranks")


def attention_of(model: nn.Module) -> Any:
    return getattr(model, "hf_model", model).get_submodule(LAYER)


def words_of(model: nn.Module, sharding: Sharding) -> dict[str, str]:
    prefix = f"{'hf_model.' if hasattr(model, 'hf_model') else ''}{LAYER}."
    words = sharding.plan.items()
    return {name.removeprefix(prefix): how for name, how in words if name.startswith(prefix)}


@cache
def models_of(kind: str) -> tuple[nn.Module, list[nn.Module]]:
    """The whole model, and those of two ranks that do not sum yet."""
    parts = [whole(KINDS[kind]) for _ in range(2)]
    for i, part in enumerate(parts):
        Sharding.of(part, rank(i)).cut()
    return whole(KINDS[kind]), parts


def attended(model: nn.Module) -> Tensor:
    """The result of the first layer's attention."""
    hf_model = getattr(model, "hf_model", model)
    tables = hf_model.model.rotary_emb(X, torch.arange(X.shape[1])[None])
    out: Tensor
    out, _ = attention_of(model)(X, attention_mask=None, position_embeddings=tables)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_results_of_ranks_sum_up_to_the_whole(kind: str) -> None:
    model, parts = models_of(kind)
    outs = [attended(part) for part in parts]
    torch.testing.assert_close(outs[0] + outs[1], attended(model), atol=1e-4, rtol=1e-4)
    assert not outs[0].allclose(outs[1], atol=1e-2)


@pytest.mark.rotating
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_the_weights_of_its_heads_and_whole_latents(kind: str) -> None:
    model, parts = models_of(kind)
    given, last = attention_of(model), attention_of(parts[1])
    divided = {"kv_b_proj": (72, 16), "o_proj": (64, 24)}
    queries = "q_proj" if given.q_proj is not None else "q_b_proj"
    assert last.kv_b_proj.weight.equal(given.kv_b_proj.weight[64:])
    assert last.o_proj.weight.equal(given.o_proj.weight[:, 24:])
    rows = getattr(given, queries).weight
    assert getattr(last, queries).weight.equal(rows[72:]) and len(rows) == 144
    for name, weight in given.named_parameters():
        if name.partition(".")[0] not in (*divided, queries):
            assert weight.equal(last.get_parameter(name)), name
    held = sum(weight.numel() for weight in last.parameters())
    latents = sum(w.numel() for name, w in given.named_parameters() if "_a_" in name)
    assert 2 * (held - latents) == sum(w.numel() for w in given.parameters()) - latents
    assert last.num_heads == 2
    if KINDS[kind].kind == "stock":
        assert (given.kv.shape, last.kv.shape) == ((0, 4, 36), (0, 2, 36))


def test_a_model_is_wrapped_after_it_is_divided() -> None:
    model = whole(KINDS["DeepSeek-V3, in a program"])
    Sharding.of(model, rank()).cut()
    assert attention_of(wrap_stock(model)).kv.shape == (0, 2, 36)


def test_each_layer_has_two_sums() -> None:
    sharding = Sharding.of(whole(KINDS["Youtu, queries of no latent"]), rank())
    layers = [f"hf_model.model.layers.{i}" for i in range(2)]
    assert sorted(sharding.summed) == sorted(
        f"{layer}.{name}" for layer in layers for name in ("self_attn.o_proj", "mlp.down_proj")
    )
    assert sharding.tables == ["hf_model.model.embed_tokens", "hf_model.lm_head"]


# ---- what stays whole, and what is refused


def test_a_layer_with_parameters_of_unknown_use_stays_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = whole(KINDS["DeepSeek-V3"])
    second = model.hf_model.get_submodule(LAYER.replace("0", "1"))
    for attention in (attention_of(model), second):
        attention.g_proj = nn.Linear(64, 4)
    with caplog.at_level(logging.WARNING):
        sharding = Sharding.of(model, rank())
    assert not any("self_attn" in name for name in sharding.plan)
    [line] = [line for line in caplog.messages if "stays whole" in line]
    assert line == (
        f"hf_model.{LAYER} stays whole on each rank: beside latent attention it has g_proj, which "
        "may belong to heads (2 such layers)"
    )
    caplog.clear()
    del second.g_proj
    assert f"hf_model.{LAYER}.kv_b_proj".replace("0", "1") in Sharding.of(model, rank()).linears


@pytest.mark.parametrize(
    ("name", "replaced"),
    [("kv_b_proj", nn.Identity()), ("kv_a_layernorm", None), ("q_b_proj", None)],
)
def test_what_lacks_a_part_is_no_latent_attention(name: str, replaced: nn.Module | None) -> None:
    model = whole(KINDS["DeepSeek-V3"])
    setattr(attention_of(model), name, replaced)
    assert not words_of(model, Sharding.of(model, rank()))


def test_the_words_of_a_plan_stay() -> None:
    """One that cuts a part is that of the whole layer."""
    model = whole(KINDS["DeepSeek-V3"])
    given = model.hf_model.tp_plan
    model.hf_model.tp_plan = {**given, "model.layers.*.self_attn.o_proj": "rowwise_split_input"}
    assert words_of(model, Sharding.of(model, rank())) == {"o_proj": "rowwise_split_input"}


def test_heads_that_do_not_divide_are_refused() -> None:
    model = whole(KINDS["DeepSeek-V3"])
    with pytest.raises(ValueError, match=r"4 heads \(num_attention_heads\) do not divide by 3; "):
        atomc.parallelize(model, rank(0, 3))
    assert attention_of(model).kv_b_proj.weight.shape == (128, 32)


def test_a_part_of_a_block_of_scales_is_refused_with_the_parts_that_work() -> None:
    """Of queries, keys and values each of four ranks would have a block, of results half a one."""
    sizes = LATENT_BLOCKS | {"intermediate_size": 512}
    model = whole(Case("youtu", "stock", sizes, scheme="fp8_block"))
    Sharding.of(model, rank(0, 2))
    sentence = r"o_proj: a cut of 256 inputs in 4 gives 64, .* parts that work are 1, 2$"
    with pytest.raises(ValueError, match=sentence):
        Sharding.of(model, rank(0, 4))


# ---- checkpoints and plans


def config_of(**differs: Any) -> dict[str, Any]:
    # transformers zeroes the row of a padding token when it loads.
    sizes = TINY | LATENT_BLOCKS | {"pad_token_id": None}
    config = transformers.AutoConfig.for_model("youtu", **(sizes | differs))
    return {**config.to_dict(), "architectures": ["YoutuForCausalLM"]}


@pytest.mark.parametrize("scheme", [None, "fp8_block", "mxfp4_a16"])
def test_a_rank_reads_its_heads(scheme: str | None, tmp_path: Path) -> None:
    model = create_model(config_of(), torch.bfloat16)
    fill(model)
    (tmp_path / "config.json").write_text(json.dumps(config_of(dtype="bfloat16")))
    tensors = {
        name.removeprefix("hf_model."): weight.detach().contiguous()
        for name, weight in model.named_parameters()
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    part = assert_parts(tmp_path, quantization=scheme)
    layer = attention_of(part)
    assert (layer.kv_b_proj.out_features, layer.o_proj.in_features) == (256, 128)
    assert layer.kv_a_proj_with_mqa.out_features == 192


@SLOW
def test_a_plan_counts_two_sums_a_layer_and_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of()))
    found = plan_step(build_model(tmp_path, devices=2), Platform.named("h200"), Workload(4, 2, 32))
    sent, layer = found.communication, "hf_model.model.layers.*.self_attn"
    assert (sent.all_reduces, sent.gathers) == (2 * 2 + 1, 1)
    rows = {row.parameter: (row.how, row.shape) for row in sent.cuts}
    assert rows[f"{layer}.q_b_proj.weight"] == ("colwise", (256, 128))
    assert rows[f"{layer}.kv_b_proj.weight"] == ("colwise", (256, 128))
    assert rows[f"{layer}.o_proj.weight"] == ("rowwise", (128, 128))
    assert rows[f"{layer}.kv_a_proj_with_mqa.weight"] == ("", (192, 128))
