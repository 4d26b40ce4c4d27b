"""Bytes that processes send each other: in the cost of a graph, and in the plan of a model that is
cut over devices.
"""

import dataclasses
import json

import pytest
import torch
from fake_group import fake_group
from tiny_experts import CONFIGS

import atomc
from atomc import ops
from atomc.cost.efficiency import predict
from atomc.ops.op import op
from atomc.ops.op_traits import Kind
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import plan_step
from atomc.platform import Platform

H200 = Platform.named("h200")
WIDTHS = dict.fromkeys(CONFIGS, "intermediate_size") | {"qwen3_moe": "moe_intermediate_size"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "torch_dtype": "bfloat16",
}


def test_a_collective_sends_what_a_ring_sends():
    group = fake_group(4)

    def function(x, r, w):
        y, total = ops.allreduce_add_rms_norm(x, r, w, 1e-6, group)
        return ops.all_gather(y, 4, group), total

    given = torch.randn(6, 32), torch.randn(6, 32), torch.randn(32)
    report = atomc.explain(function, *given, options={"strict": True, "glue": "eager"})
    sent = {
        p.op: (p.sent, p.least)
        for p in predict(report.costs, [], H200, {"T": 6, "R": 6, "S": 6, "C": 1, "N": 4})
    }
    size = 6 * 32 * 4
    assert sent["allreduce_add_rms_norm"][0] == 2 * 3 * size / 4
    assert sent["all_gather"][0] == 3 * size
    assert sent["all_gather"][1] == 3 * size / 450e9 + 5 * size / 4.8e12
    alone = predict(report.costs, [], H200, {"T": 6, "R": 6, "S": 6, "C": 1})
    assert not any(p.sent for p in alone)


def test_a_collective_op_must_say_what_it_sends():
    with pytest.raises(ValueError, match=r"op whispered: say how many bytes a process sends"):

        @op(kind=Kind.COLLECTIVE, rows=None)
        def whispered(x: torch.Tensor) -> torch.Tensor:
            return x.clone()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return plan_step(build_model(folder, devices=2), H200, Workload(4, 2, 32))


def test_a_plan_says_where_collectives_stand_and_what_their_links_need(found):
    sent = found.communication
    rows = {row.module_path: (row.kind, row.calls, row.sent) for row in sent.collectives}
    message = 4 * 64 * 2
    assert rows == {
        "model.embed_tokens": ("all-reduce", 1, message),
        "model.layers.*.self_attn.o_proj": ("all-reduce", 3, message),
        "model.layers.*.mlp.down_proj": ("all-reduce", 3, message),
        "lm_head": ("gather", 1, 2 * 48 * 2),
    }
    assert sent.link == 450e9 and sent.seconds == sent.sent / 450e9
    assert sent.sent == sum(row.calls * row.sent for row in sent.collectives)
    text = found.to_text()
    assert "behind" in text and "ms at 450.0 GB/s (not in the time)" in text


@pytest.mark.rotating
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_experts_of_a_plan_are_summed_and_cut(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    sent = plan_step(build_model(tmp_path, devices=2), H200, Workload(4, 2, 32)).communication
    layers = CONFIGS[kind]["num_hidden_layers"]
    assert (sent.all_reduces, sent.gathers) == (2 * layers + 1, 1)
    cuts = {row.parameter: row for row in sent.cuts}
    down = cuts["model.layers.*.mlp.experts.down_proj"]
    assert down.how == "moe_tp_experts" and down.count == layers
    assert down.shape[-1] == CONFIGS[kind][WIDTHS[kind]] // 2


def test_a_plan_says_which_parameter_is_cut_how(found):
    cuts = {row.parameter: (row.how, row.shape, row.count) for row in found.communication.cuts}
    assert cuts["model.layers.*.self_attn.o_proj.weight"] == ("rowwise", (64, 32), 3)
    assert cuts["model.layers.*.mlp.up_proj.weight"] == ("colwise", (64, 64), 3)
    assert cuts["lm_head.weight"] == ("colwise_gather_output", (48, 64), 1)
    assert cuts["model.norm.weight"] == ("", (64,), 1)
    assert "on every device" in found.to_text()


def test_without_known_links_no_time_is_given(found):
    sent = dataclasses.replace(found.communication, link=None)
    text = dataclasses.replace(found, communication=sent).to_text()
    assert sent.seconds is None and "whose links are unknown (not in the time)" in text
    assert Platform.named("sm89").link is None
