"""Plans: what a step costs on a machine that is not here, held against sums made by hand and steps
that were measured.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from atomc.cli import arguments, main
from atomc.cost.efficiency import SHIPPED, Table, Timing, evaluated, fit, predict, shipped
from atomc.loading.create_model import create_model
from atomc.ops import Tokens
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import compile_for, plan_step
from atomc.platform import GIB, Platform
from atomc.quantization import ONLINE, quantize

pytestmark = pytest.mark.xdist_group("plan")
ROOT = Path(__file__).parents[2]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
}
SHAPES = {
    "0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8b": {
        **QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 2, 512, 8, 4, 64, 1024, 4096
SMALL = {
    **QWEN3,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def programs():
    """SMALL compiled for a machine and a number of devices, once each."""
    made = {}

    def program(model, platform):
        key = platform.name, model.devices, model.quantization and model.quantization.method
        made[key] = made.get(key) or compile_for(model, platform)
        return made[key]

    return program


@pytest.fixture
def planned(folder, programs):
    def found(platform, load=None, devices=1, quantization=None, config=None):
        where = Platform.named(platform) if isinstance(platform, str) else platform
        model = build_model(
            folder(config or SMALL), devices=devices, quantization=quantization, platform=where
        )
        return plan_step(model, where, load or Workload(), program=programs(model, where))

    return found


@pytest.fixture
def folder(tmp_path):
    def made(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return made


def shapes(module):
    """Of the parameters, each with the first of its names."""
    return {name: (x.shape, x.dtype) for name, x in module.named_parameters()}


def lines_of(found, op):
    return [line for line in found.lines if line.op == op]


# Times


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "scheme", "batches"),
    [
        pytest.param("0.6b", None, {1, 8, 64}, marks=pytest.mark.slow),
        ("8b", None, {1, 8, 64}),
        ("8b", "fp8", {1, 8, 64}),
        pytest.param("8b", "fp8_block", {1, 8, 64}, marks=pytest.mark.slow),
        pytest.param("8b", "fp8_per_token", {1}, marks=pytest.mark.slow),
        ("8b", "int4", {1}),
    ],
)
def test_predicted_decode_steps_of_the_h200_are_within_a_quarter_of_the_measured_ones(
    folder, name, scheme, batches
):
    file = ROOT / f"bench/results/decode-{'quant-' if scheme else ''}h200.json"
    figures = [json.loads(line) for line in file.read_text().splitlines()]
    measured = {
        f["batch"]: f["tpot_ms"]
        for f in figures
        if (f["model"], f["what"], f["context"]) == (name, "atomc", 1024)
        and f.get("quantization") == scheme
    }
    h200 = Platform.named("h200")
    model = build_model(folder(SHAPES[name]), layers=2, quantization=scheme, platform=h200)
    program = compile_for(model, h200)
    assert set(measured) == batches
    for batch, tpot in measured.items():
        found = plan_step(model, h200, Workload(batch, batch, 1024), program=program)
        layers = sum(
            line.seconds * line.calls / 2
            for line in found.lines
            if line.in_layers and line.calls == 2
        )
        rest = sum(
            line.seconds * line.calls
            for line in found.lines
            if not (line.in_layers and line.calls == 2)
        )
        assert (SHAPES[name]["num_hidden_layers"] * layers + rest) * 1e3 == pytest.approx(
            tpot, rel=0.25
        )


@pytest.mark.rotating
def test_a_machine_on_which_nothing_was_measured_gets_a_lower_bound(planned):
    b200, h200 = planned("sm100"), planned("h200")
    assert b200.lower_bound == "lower bound: no kernel was measured on NVIDIA B200"
    assert not any(line.measured for line in b200.lines)
    assert all(line.measured for line in lines_of(h200, "linear"))
    (head,) = [line for line in lines_of(b200, "linear") if line.module_path == "lm_head"]
    assert head.bytes == 2 * (WIDTH + WIDTH * VOCABULARY + VOCABULARY)
    assert head.seconds == pytest.approx(0.75e-6 + head.bytes / 7.7e12)


def test_a_machine_of_which_nothing_is_known_gets_bytes_and_no_time(planned):
    found = planned("cpu")
    assert "the bandwidth of" in found.lower_bound
    assert found.total("seconds") is None and found.total("bytes") > 0


def test_a_line_through_measurements_gives_floor_and_efficiency_back():
    timings = [
        Timing("linear", "triton", tokens, work, 2e-6 + work / 0.8)
        for tokens in (1, 16)
        for work in (1e-6, 5e-6, 4e-5)
    ]
    table = fit(timings, "machine", 1e12, 1e15, "made up")
    few, many = table.rows
    assert (few.first, few.last, many.first, many.last) == (1, 4, 5, None)
    assert few.floor == pytest.approx(2e-6) and few.efficiency == pytest.approx(0.8)
    assert table.row("linear", "triton", 3) is few and table.row("linear", "triton", 10**6) is many
    assert table.row("linear", "cuda", 3) is None
    assert Table.of(json.loads(json.dumps(table.to_dict()))) == table


@pytest.mark.parametrize(
    "points",
    [
        [(1e-9, 1e-6)],
        [(1e-9, 1e-6), (2e-9, 0.9e-6)],
        [(1e-5, 1e-5), (1e-4, 1.1e-4)],
        [(1e-5, 0.9e-5), (2e-5, 1.9e-5)],
    ],
    ids=["one point", "less time for more work", "no floor", "faster than the data sheet"],
)
def test_no_floor_is_negative_and_no_efficiency_above_1(points):
    (row,) = fit(
        [Timing("rms_norm", "triton", 1, *point) for point in points],
        "machine",
        1e12,
        1e15,
        "made up",
    ).rows
    assert row.floor >= 0 and 0 < row.efficiency <= 1
    assert all(row.seconds(work) == pytest.approx(seconds, rel=0.12) for work, seconds in points)


def test_a_new_table_keeps_the_rows_of_kernels_that_it_did_not_meet():
    def table(source, *rows):
        timings = [Timing(*row, 1, 1e-6, seconds) for *row, seconds in rows]
        return fit(timings, "machine", 1e12, 1e15, source)

    old = table("old", ("linear", "triton", 2e-6), ("linear", "cuda", 3e-6))
    new = table("new", ("linear", "triton", 5e-6), ("rope", "triton", 1e-6))
    both = new.over(old)
    assert both.rows[:2] == new.rows and both.rows[2:] == tuple(
        row for row in old.rows if row.kernel == "cuda"
    )
    assert both.source == "new; rest: old"
    assert new.over(table("old", ("rope", "triton", 9e-6))) is new


def test_a_table_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"version 0, expected 1: measure again"):
        Table.of({"version": 0})
    with pytest.raises(ValueError, match=r"not a table of efficiencies: 'machine'"):
        Table.of({"version": 1, "rows": []})


def test_the_shipped_table_says_where_it_is_from():
    (table,) = shipped().values()
    assert table.machine == Platform.named("h200").name and "bench/" in table.source
    assert {"linear", "paged_attention", "add_rms_norm", "silu_and_mul"} <= {
        row.op for row in table.rows
    }


def test_a_range_of_tokens_is_read_as_reports_spell_it():
    ranges = [Tokens(1, 1), Tokens(2, 16), Tokens(17), Tokens()]
    assert [Tokens.of(str(tokens)) for tokens in ranges] == ranges
    assert Tokens.of("any") == Tokens()


def test_few_tokens_and_many_are_served_by_the_kernels_of_their_ranges(folder, programs):
    h200 = Platform.named("h200")
    report = programs(build_model(folder(SMALL)), h200).report
    kernels = [
        {
            p.kernel
            for p in predict(report.costs, report.kernels, h200, Workload(t, t, 64).sizes)
            if p.op in ("linear", "silu_and_mul")
        }
        for t in (1, 64)
    ]
    assert kernels == [{"triton"}, {"cuda", "triton"}]


def test_a_graph_whose_sizes_are_not_those_of_a_step_is_refused():
    with pytest.raises(ValueError, match=r"sizes \['s0'\] that a step does not define"):
        evaluated("2*T*s0", (("T", 3),))


@pytest.mark.parametrize("load", [(0, 1, 8), (1, 2, 8), (17, 2, 8)])
def test_a_step_that_cannot_be_is_refused(load):
    with pytest.raises(ValueError, match="a step of"):
        Workload(*load)


# Memory


def weights_of(devices, size=2):
    """Bytes of SMALL's weights on one of so many devices, `size` bytes a number in its linear
    layers.
    """
    q, kv, inner = HEADS * HEAD // devices, KV_HEADS * HEAD // devices, INNER // devices
    linears = LAYERS * (2 * q * WIDTH + 2 * kv * WIDTH + 3 * inner * WIDTH)
    norms = LAYERS * (2 * WIDTH + 2 * HEAD) + WIDTH
    return size * linears + 2 * (2 * VOCABULARY // devices * WIDTH + norms)


@pytest.mark.rotating
@pytest.mark.parametrize("devices", [1, 4])
def test_weights_and_cache_of_a_device_are_those_counted_by_hand(planned, devices):
    memory = planned("h200", devices=devices).memory
    assert 0 <= memory.weights - weights_of(devices) <= 1024  # rotary frequencies, too
    assert memory.per_token == LAYERS * 2 * KV_HEADS // devices * HEAD * 2
    assert memory.fits == memory.cache // (memory.per_token * memory.longest)
    assert memory.cache < 0.9 * memory.total - memory.weights


@pytest.mark.rotating
def test_weights_in_fp8_take_half_and_their_scales(planned):
    memory = planned("gfx950", quantization="fp8").memory
    assert 0 <= memory.weights - weights_of(1, size=1) <= 2048


def test_a_sequence_that_fits_nowhere_is_said_to_be_too_long(planned):
    tiny = dataclasses.replace(Platform.named("h200"), memory=GIB // 40)
    memory = planned(tiny, config={**SMALL, "max_position_embeddings": 10**6}).memory
    assert memory.fits == 0 and 0 < memory.longest_that_fits < 10**6


# Cut over devices


def test_a_device_gets_its_share_of_heads_hidden_units_and_vocabulary(folder):
    layer = build_model(folder(SMALL), devices=4).module
    shapes = {name: tuple(weight.shape) for name, weight in layer.named_parameters()}
    assert [
        shapes[name]
        for name in (
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "lm_head.weight",
        )
    ] == [(2 * HEAD, WIDTH), (HEAD, WIDTH), (WIDTH, 256), (1024, WIDTH)]


def test_a_head_of_keys_that_several_devices_hold_is_counted_on_each(planned):
    assert planned("h200", devices=8).memory.per_token == LAYERS * 2 * HEAD * 2


@pytest.mark.parametrize(
    "devices, why",
    [
        (3, r"8 heads \(num_attention_heads\) do not divide by 3; 1, 2, 4 and 8 do"),
        (0, "0 devices: expected at least 1"),
    ],
)
def test_what_does_not_divide_is_refused(folder, devices, why):
    with pytest.raises(ValueError, match=why):
        build_model(folder(SMALL), devices=devices)


def test_each_device_sends_the_bytes_of_a_ring(planned):
    found = planned("h200", Workload(tokens=6, sequences=2, context=64), devices=4)
    sent = found.communication
    assert (sent.all_reduces, sent.gathers, sent.message) == (2 * LAYERS + 1, 1, 6 * WIDTH * 2)
    assert sent.sent == sent.all_reduces * 2 * 3 * sent.message // 4 + 3 * 2 * VOCABULARY // 4 * 2
    assert planned("h200").communication is None


def test_a_layer_of_a_device_moves_its_share_of_the_weights(planned):
    whole, cut = (planned("h200", Workload(1, 1, 64), devices=n) for n in (1, 4))
    (down,) = [line for line in cut.lines if line.module_path.endswith("down_proj")]
    assert (
        down.bytes == 2 * (INNER // 4 + INNER // 4 * WIDTH + WIDTH)
        and down.calls == LAYERS
        and down.in_layers
    )
    assert cut.total("bytes", layers_only=True) < whole.total("bytes", layers_only=True) / 3


@pytest.mark.rotating
def test_a_model_of_transformers_is_cut_by_its_own_plan(folder):
    pytest.importorskip("transformers")
    config = {**SMALL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    model = build_model(folder(config), devices=2, layers=1)
    found = plan_step(model, Platform.named("h200"), Workload())
    assert found.model == "Qwen2ForCausalLM"
    # The plan of transformers 5.17 leaves the embedding whole.
    is_cut = "model.embed_tokens" in model.module.hf_model.tp_plan
    assert found.communication.all_reduces == 2 + is_cut
    assert found.communication.gathers == 1
    whole = {name: x.shape for name, x in model.module.named_parameters() if "proj.weight" in name}
    assert {tuple(shape) for name, shape in whole.items() if "down_proj" in name} == {
        (WIDTH, INNER // 2)
    }


# Machines and numbers


@pytest.mark.rotating
@pytest.mark.parametrize(
    "platform, dtype", [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)]
)
def test_an_amd_gpu_gets_its_kernels_and_its_own_fp8(folder, programs, platform, dtype):
    where = Platform.named(platform)
    model = build_model(folder(SMALL), quantization="fp8", platform=where)
    assert model.module.model.layers[0].mlp.down_proj.weight.dtype == dtype
    found = plan_step(model, where, Workload(), program=programs(model, where))
    assert found.arch == platform and "aiter" in {line.kernel for line in found.lines}
    # All but the first norm stand behind an addition, and the last one feeds the head, which is not
    # quantized.
    assert sum(line.calls for line in lines_of(found, "add_rms_norm_quant")) == 2 * LAYERS - 1


@pytest.mark.parametrize("scheme", ONLINE)
def test_weights_have_the_tensors_of_their_scheme_and_siblings_share_a_scale(folder, scheme):
    module = build_model(folder(SMALL), quantization=scheme, layers=1).module
    attention = module.model.layers[0].self_attn
    tensors = ONLINE[scheme].tensors(KV_HEADS * HEAD, WIDTH, torch.bfloat16)
    assert {
        name: (tuple(x.shape), x.dtype) for name, x in attention.k_proj.named_parameters()
    } == tensors
    assert (attention.k_proj.weight_scale is attention.v_proj.weight_scale) == (scheme == "fp8")
    quantized = quantize(
        create_model({**SMALL, "num_hidden_layers": 1}, torch.bfloat16, "meta"), scheme
    )
    assert shapes(module) == shapes(quantized)


def test_a_quantized_checkpoint_is_planned_as_it_is(folder):
    stored = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    model = build_model(folder({**SMALL, "quantization_config": stored}), layers=1)
    assert model.module.model.layers[0].mlp.up_proj.weight_scale.shape == (
        INNER // 128,
        WIDTH // 128,
    )
    with pytest.raises(ValueError, match="already quantized"):
        build_model(folder({**SMALL, "quantization_config": stored}), quantization="int4")


# The command


def test_the_names_of_the_command_line_are_those_of_the_schemes():
    assert tuple(ONLINE) == arguments.SCHEMES


@pytest.mark.rotating
def test_a_quantized_plan_is_asked_for_by_either_name(folder, capsys):
    path, texts = folder(SMALL), []
    for asked in (
        ["--dtype", "fp8"],
        ["--quantization", "fp8"],
        ["--quantization", "fp8", "--dtype", "bfloat16"],
    ):
        assert (
            main(
                [
                    "explain",
                    str(path),
                    "--layers",
                    "1",
                    "--platform",
                    "h200",
                    "--plan",
                    "--json",
                    *asked,
                ]
            )
            == 0
        )
        (data,) = json.loads(capsys.readouterr().out)
        texts.append(
            [
                {key: line[key] for key in ("op", "kernel", "bytes")}
                for line in data["plan"]["lines"]
            ]
        )
    assert texts[0] == texts[1] == texts[2]
    assert "scaled_linear_fp8" in {line["op"] for line in texts[0]}


def test_the_command_prints_memory_kernels_and_sums(folder, capsys):
    path = folder(SMALL)
    asked = [
        "--layers",
        "1",
        "--platform",
        "gfx950",
        "--dtype",
        "fp8",
        "--tp",
        "4",
        "--sequences",
        "8",
    ]
    assert main(["explain", str(path), *asked]) == 0
    out = capsys.readouterr().out
    assert (
        "plan: Qwen3ForCausalLM in fp8 on AMD Instinct MI355X (gfx950), sharded over 4 devices"
        in out
    )
    assert "memory of a device" in out and "each device sends" in out
    assert "lower bound: no kernel was measured on AMD Instinct MI355X" in out
    assert "add_rms_norm_quant" in out.partition("plan: ")[0]  # the fusions stand before the plan


@pytest.mark.rotating
def test_the_plan_is_in_the_json(folder, capsys):
    asked = ["--layers", "1", "--platform", "h200", "--kv-cache-dtype", "fp8", "--json"]
    assert main(["explain", str(folder(SMALL)), *asked]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    found = report["plan"]
    assert found["load"] == {"tokens": 1, "sequences": 1, "context": 1024}
    assert found["memory"]["per_token"] == 2 * KV_HEADS * HEAD  # a byte each
    assert found["totals"]["bytes"]["step"] == sum(
        line["bytes"] * line["calls"] for line in found["lines"]
    )


@pytest.mark.parametrize(
    "asked, why",
    [
        (["--tp", "3"], "8 heads (num_attention_heads) do not divide by 3; 1, 2, 4 and 8 do"),
        (["--plan", "--why", "rms_norm"], "cannot be combined with --why"),
        (["--measure", "--platform", "h200"], "leave one of them out"),
        (["--tokens", "5", "--sequences", "9"], "a step of 5 tokens"),
        (["--plan", "--efficiency", "{path}/config.json"], "not a table of efficiencies"),
        (["--plan", "--efficiency", "none.json"], "--efficiency none.json: No such file"),
        (
            ["--platform", "sm80", "--plan", "--efficiency", str(SHIPPED)],
            "has no table for NVIDIA A100",
        ),
    ],
)
def test_the_command_refuses_in_one_line(folder, capsys, asked, why):
    path = folder(SMALL)
    assert main(["explain", str(path), *(part.format(path=path) for part in asked)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_function_has_no_plan(capsys):
    assert main(["explain", "some.module:build", "--plan"]) == 2
    assert "a plan needs a config.json; some.module:build is a function" in capsys.readouterr().err


# Draft layers

LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def drafted(folder, drafts, load, devices=1):
    where = Platform.named("h200")
    model = build_model(folder(LATENT), devices=devices, platform=where, drafts=drafts)
    return model, plan_step(model, where, load, longest=65536)


def of_draft(found):
    return [row for row in found.lines if row.module_path.startswith("draft")]


@pytest.mark.slow
def test_a_plan_has_bytes_time_and_cache_of_the_draft_layer(folder):
    load = Workload(tokens=12, sequences=4, context=64)
    _, without = drafted(folder, 0, load)
    model, one = drafted(folder, 1, load)
    _, two = drafted(folder, 2, load)
    row = 2 * (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])
    assert [each.memory.per_token for each in (without, one, two)] == [3 * row, 4 * row, 4 * row]
    assert without.memory.fits > 1.3 * one.memory.fits > 0
    own = sum(x.nbytes for x in model.draft_layers[0].layer.parameters())
    assert one.memory.draft == one.memory.weights - without.memory.weights == own
    assert one.mixture.held - without.mixture.held == without.mixture.held // 2  # 2 layers, then 3

    assert not of_draft(without) and without.total("bytes") < one.total("bytes")
    assert one.total("bytes", layers_only=True) == without.total("bytes", layers_only=True)
    for what in ("bytes", "seconds", "flops"):
        first, both = (
            sum(getattr(line, what) * line.calls for line in of_draft(each)) for each in (one, two)
        )
        assert one.total(what) == pytest.approx(without.total(what) + first)
        # The second step has 4 tokens, and not 12.
        assert 1.2 * first < both < 2 * first
    experts = [line for line in of_draft(two) if line.op == "moe_experts"]
    assert sorted(line.calls for line in experts) == [1, 1]


@pytest.mark.slow
def test_collectives_of_draft_steps_are_counted(folder):
    load = Workload(tokens=12, sequences=4, context=64)
    _, without = drafted(folder, 0, load, devices=2)
    _, two = drafted(folder, 2, load, devices=2)
    # Of a draft step: the embedding, o_proj, down_proj, and that of the shared expert.
    gained = two.communication.all_reduces - without.communication.all_reduces
    per_layer = (without.communication.all_reduces - 1 - 2) // 2  # 1 dense layer has two
    assert gained == 2 * (1 + per_layer)
    assert two.communication.gathers == 3 and without.communication.gathers == 1
    rows = (12 + 4) * LATENT["hidden_size"] * 2 * (1 + per_layer)
    logits = 2 * 4 * LATENT["vocab_size"] // 2 * 2
    assert two.communication.sent - without.communication.sent == rows + logits


@pytest.mark.rotating
def test_the_command_plans_a_draft_layer_or_says_why_not(folder, capsys):
    path = str(folder(LATENT | {"num_hidden_layers": 1}))
    given = [path, "--platform", "h200", "--sequences", "4", "--speculative", "mtp"]
    assert main(["explain", *given, "--speculative-tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "a step of 12 tokens, 4 sequences" in out and "of these, draft layer" in out
    assert "draft.layer.eh_proj" in out and out.index("DraftModel") > out.index("DeepseekV3")
    assert main(["explain", *given, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["plan"]["memory"]["draft"] and "plan" not in second
    folder(LATENT | {"num_hidden_layers": 1, "num_nextn_predict_layers": 2})
    assert main(["explain", *given, "--speculative-tokens", "3", "--json"]) == 0
    with_two, *of_layers = json.loads(capsys.readouterr().out)
    assert [report["model"] for report in of_layers] == ["DraftModel"] * 2
    of_two, of_one = with_two["plan"]["memory"], first["plan"]["memory"]
    assert of_two["draft"] == 2 * of_one["draft"]
    assert of_two["per_token"] == 1.5 * of_one["per_token"]

    def refusal(*flags, **config):
        folder(LATENT | config)
        assert main(["explain", path, *flags]) != 0
        return capsys.readouterr().err

    assert "--measure does not time draft steps" in refusal("--measure", "--speculative", "mtp")
    assert "needs --speculative mtp" in refusal("--speculative-tokens", "2")
    none = refusal("--speculative", "mtp", num_nextn_predict_layers=0)
    assert "DeepseekV3ForCausalLM has no draft layers" in none
