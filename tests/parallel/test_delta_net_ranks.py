"""Gated delta nets divided over ranks: heads and state of each, what their results sum up to, what
is read from a checkpoint, the plan, refusals. No processes: see tests/parallel/test_tensor_parallel.py and
tests/runtime/ranks/test_ranks_models.py.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tensor_parallel_ranks import TINY, Case, fill, whole
from test_tensor_parallel_loading import assert_parts
from torch import nn

import atomc
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.parallel import sizes
from atomc.parallel.division import Division
from atomc.parallel.process_group import Place, TensorParallel
from atomc.parallel.sharding import Sharding
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import plan_step
from atomc.platform import Platform

pytest.importorskip("transformers")

SLOW = pytest.mark.slow
# Keys and values of different widths, so that a cut at the wrong column shows.
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
KINDS = {
    "packed": Case("qwen3_next", "ours", HYBRID | EXPERTS),
    "packed, stock": Case("qwen3_next", "stock", HYBRID | EXPERTS),
    "split": Case("qwen3_5_text", "ours", HYBRID),
    "split, stock": Case("qwen3_5_text", "stock", HYBRID),
    "split, in a program": Case("qwen3_5_text", "transformers", HYBRID),
    "separate": Case("olmo_hybrid", "stock", HYBRID | {"linear_num_value_heads": 2}),
}
X = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))


def rank(index: int = 0, size: int = 2) -> TensorParallel:
    return TensorParallel(index, size, "ranks")


def cut(model: nn.Module, place: TensorParallel) -> Sharding:
    sharding = Sharding.of(model, place)
    sharding.cut()
    return sharding


@cache
def models_of(kind: str) -> tuple[nn.Module, list[nn.Module], str]:
    """The whole model, those of two ranks that do not sum yet, and the name of the delta net."""
    parts = [whole(KINDS[kind]) for _ in range(2)]
    [name], _ = (cut(part, rank(i)).recurrent for i, part in enumerate(parts))
    return whole(KINDS[kind]), parts, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_results_of_ranks_sum_up_to_the_whole(kind: str) -> None:
    model, parts, name = models_of(kind)
    nets = [part.get_submodule(name) for part in parts]
    expected = model.get_submodule(name)(X)
    torch.testing.assert_close(nets[0](X) + nets[1](X), expected, atol=1e-4, rtol=1e-4)
    assert not nets[0](X).allclose(nets[1](X), atol=1e-2)
    if KINDS[kind].kind == "stock":  # as the class computes it, with which a start compares
        own = [type(net).forward(net, X) for net in nets]
        torch.testing.assert_close(own[0] + own[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "program" not in kind])
def test_a_rank_has_the_state_of_its_heads(kind: str) -> None:
    model, parts, name = models_of(kind)
    net = model.get_submodule(name)
    _, heads, *head = net.delta_state.shape
    _, taps, channels = net.conv_state.shape
    for part in parts:
        own = part.get_submodule(name)
        assert own.delta_state.shape == (0, heads // 2, *head)
        assert own.conv_state.shape == (0, taps, channels // 2)
        assert own.conv_state.dtype == net.conv_state.dtype
        assert len(own.A_log) == len(own.dt_bias) == heads // 2
        held = sum(weight.numel() for weight in own.parameters())
        of_norm = head[1]
        assert 2 * (held - of_norm) == sum(w.numel() for w in net.parameters()) - of_norm
        assert own.conv1d.groups == own.conv1d.in_channels == len(own.conv1d.weight)


def test_a_rank_has_the_queries_keys_and_values_of_its_heads() -> None:
    model, parts, name = models_of("split")
    net, last = model.get_submodule(name), parts[1].get_submodule(name)
    rows = [*range(8, 16), *range(24, 32), *range(32 + 36, 32 + 72)]
    assert last.in_proj_qkv.weight.equal(net.in_proj_qkv.weight[rows])
    assert last.conv1d.weight.equal(net.conv1d.weight[rows])
    assert last.in_proj_b.weight.equal(net.in_proj_b.weight[3:])
    assert last.out_proj.weight.equal(net.out_proj.weight[:, 36:])


# ---- what is refused


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        # 112 rows of queries, keys, values and gates divide by 4, and 2 heads do not.
        (4, "layers.0.linear_attn: 2 key heads do not divide by 4; what divides them is 1, 2"),
        (3, "2 key heads do not divide by 3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(size: int, sentence: str) -> None:
    attention = {"num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 96}
    model = whole(Case("qwen3_5_text", "ours", HYBRID | attention))
    before = {name: weight.shape for name, weight in model.named_parameters()}
    with pytest.raises(ValueError, match=sentence):
        atomc.parallelize(model, rank(0, size))
    assert before == {name: weight.shape for name, weight in model.named_parameters()}


def test_sizes_are_refused_with_those_that_divide() -> None:
    fields = {"num_attention_heads": 48, "linear_num_key_heads": 16}
    sentence = r"16 key heads of delta nets \(linear_num_key_heads\) do not divide by 3; "
    with pytest.raises(ValueError, match=sentence + r"1, 2, 4, 8 and 16 do"):
        sizes.check({"text_config": fields}, 3)
    with pytest.raises(ValueError, match="1, 2, 4, 8 and 16 do"):
        sizes.check(fields | {"layer_types": ["linear_attention", "full_attention"]}, 3)
    sizes.check(fields | {"layer_types": ["full_attention"]}, 3)


def test_a_part_of_a_block_of_keys_is_refused() -> None:
    """256 keys have two blocks of scales for each of two ranks, and half a one for four."""
    wide = {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
    case = Case("qwen3_5_text", "ours", HYBRID | wide)
    model = atomc.quantize(whole(case), "fp8_block", ["re:^(?!.*in_proj_qkv).*$"])
    Sharding.of(model, rank(0, 2))
    sentence = r"in_proj_qkv: a cut of 256 outputs in 4 gives 64, .* parts that work are 1, 2$"
    with pytest.raises(ValueError, match=sentence):
        Sharding.of(model, rank(0, 4))


# ---- checkpoints and plans


def config_of(kind: str, **differs: Any) -> dict[str, Any]:
    from transformers import AutoConfig

    model_type, architecture = {
        "packed": ("qwen3_next", "Qwen3NextForCausalLM"),
        "split": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    }[kind]
    config = AutoConfig.for_model(model_type, **(TINY | HYBRID | EXPERTS | differs))
    return {**config.to_dict(), "architectures": [architecture]}


WIDE = {
    "hidden_size": 128,
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 2,
}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("split", {}),
        ("split", {"quantization": {"scheme": "fp8_block", "ignore": ["re:.*(mlp|self_attn).*"]}}),
        pytest.param("packed", {}, marks=SLOW),
        pytest.param(
            "packed",
            {"quantization": {"scheme": "int4", "ignore": ["re:.*(mlp|self_attn).*"]}},
            marks=SLOW,
        ),
    ],
    ids=["split", "split, fp8 blocks", "packed", "packed, 4 bits"],
)
def test_a_rank_reads_its_heads(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(kind, **WIDE)
    model = create_model(config, torch.bfloat16)
    fill(model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_parts(tmp_path, **how)


def test_a_stock_class_gathers_no_projection() -> None:
    model = whole(KINDS["packed, stock"])
    net = "hf_model.model.layers.0.linear_attn"
    words = {name.removeprefix("hf_model."): how for name, how in model.hf_model.tp_plan.items()}
    assert words["model.layers.*.linear_attn.in_proj_qkvz"] == "colwise_gather_output"
    sharding = Sharding.of(model, rank())
    assert not any(net in name for name in sharding.tables)
    assert {
        name.removeprefix(f"{net}."): how for name, how in sharding.plan.items() if net in name
    } == {
        "in_proj_qkvz": "colwise",
        "in_proj_ba": "colwise",
        "A_log": "colwise",
        "dt_bias": "colwise",
        "conv1d.weight": "packed_colwise",
        "out_proj": "rowwise",
    }


@SLOW
def test_a_plan_says_how_delta_nets_are_cut(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("split")))
    found = plan_step(build_model(tmp_path, devices=2), Platform.named("h200"), Workload(4, 2, 32))
    sent, net = found.communication, "model.layers.0.linear_attn"
    assert (sent.all_reduces, sent.gathers) == (2 * 2 + 1, 1)
    rows = {row.parameter: (row.how, row.shape) for row in sent.cuts}
    rows = {name.replace("*", "0"): row for name, row in rows.items()}
    assert rows[f"{net}.in_proj_qkv.weight"] == ("packed_colwise", (8 + 8 + 36, 64))
    assert rows[f"{net}.conv1d.weight"] == ("packed_colwise", (8 + 8 + 36, 1, 3))
    assert rows[f"{net}.A_log"] == ("colwise", (3,))
    assert rows[f"{net}.out_proj.weight"] == ("rowwise", (64, 36))
    assert rows[f"{net}.norm.weight"] == ("", (12,))


def test_random_weights_are_parts_of_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("packed")))
    model, part = (
        load(tmp_path, load_format="dummy", division=Division(Place(tp))) for tp in (None, rank(1))
    )
    cut(model, rank(1)).connect()
    expected = model.state_dict()
    assert part.state_dict().keys() == expected.keys()
    for name, tensor in part.state_dict().items():
        assert tensor.equal(expected[name]), name
