"""Models with gated delta nets: our files and the stock classes against transformers on the same
random weights, eager, compiled and served.
"""

import inspect
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from state_toy import requests_of, run
from test_mla_attention import paged_logits
from test_mla_models import generated, prompts_of, served
from test_models import TINY, error, hf_logits, hf_model
from test_moe_models import EAGER, median_error
from torch import Tensor, nn

import atomc
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.models.gated_delta_net import hybrid_layer_types
from atomc.program import Program, compile_model
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution.self_check import own_attention
from atomc.runtime.llm import LLM
from atomc.stock.adapter import wrap_stock
from atomc.stock.delta_net import LAYER_TYPE as LINEAR

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.xdist_group("delta_net_models"), pytest.mark.usefixtures("compiled_once")]

TOKENS = 70  # more than a chunk of transformers has
IDS = torch.randint(3, 96, (TOKENS,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(TOKENS)
HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
    "eos_token_id": None,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
# name -> model_type and what differs from TINY
OURS = {
    "qwen3_next": ("qwen3_next", HYBRID | EXPERTS),
    "qwen3_next, other layers": (
        "qwen3_next",
        HYBRID
        | EXPERTS
        | {
            "layer_types": None,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5e5},
        },
    ),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "qwen3_5, tied, one key head": (
        "qwen3_5_text",
        HYBRID
        | {
            "tie_word_embeddings": True,
            "linear_num_key_heads": 1,
            "linear_value_head_dim": 8,
            "layer_types": ["full_attention", "linear_attention"],
            "rms_norm_eps": 1e-3,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID | EXPERTS),
}
STOCK = {"olmo_hybrid": ("olmo_hybrid", HYBRID)}
NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
LONG = {"max_position_embeddings": 256}
KINDS = [("ours", name) for name in NAMES] + [("stock", name) for name in (*NAMES, *STOCK)]


def theirs(name: str, **differs: object) -> nn.Module:
    """The transformers model of this kind, whose states last for some tens of tokens."""
    model_type, of_kind = (OURS | STOCK)[name]
    model = hf_model(model_type, **of_kind | differs)
    generator = torch.Generator().manual_seed(2)
    for path, parameter in model.named_parameters():
        if path.endswith("A_log"):
            parameter.data.normal_(-3.0, 1.0, generator=generator)
    return model.requires_grad_(False)


def made(whose: str, name: str, **differs: object) -> nn.Module:
    """Our model or the wrapped class, with the same weights."""
    model = theirs(name, **differs)
    if whose == "stock":
        return wrap_stock(model)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load(folder, mmap=False)


@cache
def program_of(whose: str, name: str) -> Program:
    return compile_model(made(whose, name), EAGER)


def some(fast: set[Any], every: list[Any]) -> list[Any]:
    """Parameters of a test: those that run per change, and the others marked slow."""
    return [pytest.param(*one, marks=() if one in fast else pytest.mark.slow) for one in every]


@pytest.mark.parametrize("name", OURS)
def test_logits_and_names_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)

    assert type(ours).__module__.startswith("atomc.models.qwen3_")
    assert sorted(ours.state_dict()) == sorted(model.state_dict())
    for length in (1, TOKENS):
        ids, positions = IDS[:length], POSITIONS[:length]
        assert error(ours(ids, positions), hf_logits(model, ids, positions)) < 1e-4
    ids, positions = IDS.view(2, 35), POSITIONS[:35].expand(2, 35)
    assert error(ours(ids, positions), hf_logits(model, ids, positions)) < 1e-4


@pytest.mark.parametrize("name", [*OURS, *STOCK])
def test_a_wrapped_class_gives_the_same_logits(name: str) -> None:
    model = theirs(name)
    expected = hf_logits(model, IDS, POSITIONS)
    wrapped = wrap_stock(model)
    assert error(wrapped(IDS, POSITIONS), expected) < 1e-4
    handles = {path.rpartition(".")[2] for path, _ in wrapped.named_buffers()}
    assert {"conv_state", "delta_state", "kv"} <= handles


def test_a_class_without_attention_is_wrapped_too() -> None:
    model = theirs("qwen3_next", layer_types=[LINEAR, LINEAR])
    expected = hf_logits(model, IDS, POSITIONS)
    wrapped = wrap_stock(model)
    assert error(wrapped(IDS, POSITIONS), expected) < 1e-4
    assert not any(path.endswith(".kv") for path, _ in wrapped.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "stock"])
def test_a_model_without_attention_is_served(whose: str) -> None:
    differs, prompts = {"layer_types": [LINEAR, LINEAR]}, prompts_of(5, 30)
    model = theirs("qwen3_next", **differs)  # whose `generate` needs a layer with attention
    text, _ = served(made(whose, "qwen3_next", **differs), prompts, 5, max_num_batched_tokens=23)
    for prompt, tokens in zip(prompts, text, strict=True):
        logits = hf_logits(model, ids := torch.tensor([*prompt, *tokens]), torch.arange(len(ids)))
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_as_close_to_fp32_as_hugging_face_is(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, IDS, POSITIONS)
    in_bf16 = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    limit = 1.5 * median_error(hf_logits(in_bf16, IDS, POSITIONS), expected)
    for ours in (load(tmp_path, dtype=torch.bfloat16), wrap_stock(in_bf16)):
        with torch.no_grad():
            logits = ours(IDS, POSITIONS)
        assert logits.dtype == torch.bfloat16
        assert median_error(logits, expected) < limit


@pytest.mark.parametrize(
    ("whose", "name", "dtype"),
    some(
        {("stock", "qwen3_5", torch.bfloat16)},
        [(*kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)],
    ),
)
def test_a_compiled_model_computes_what_the_eager_one_does(
    whose: str, name: str, dtype: torch.dtype
) -> None:
    model = made(whose, name)
    expected = model(IDS, POSITIONS)
    model = model.to(dtype)
    eager = model(IDS, POSITIONS)
    compiled = torch.compile(model, backend="atom", options=EAGER, fullgraph=True)(IDS, POSITIONS)
    report = atomc.reports()[-1]
    assert report.num_ops["gated_delta_rule"] == report.num_ops["causal_conv1d"] == 1
    if dtype == torch.float32:
        assert error(compiled, expected) < 1e-4
    else:
        assert median_error(compiled, expected) < 1.5 * median_error(eager, expected)


def chunks_of(size: int) -> tuple[int, ...]:
    whole, rest = divmod(TOKENS, size)
    return (size,) * whole + ((rest,) if rest else ())


@pytest.mark.rotating
@pytest.mark.parametrize(("whose", "name"), some({("ours", "qwen3_5_moe")}, KINDS))
def test_chunks_give_the_logits_and_the_state_of_the_cache_of_transformers(
    whose: str, name: str
) -> None:
    model, program = theirs(name), program_of(whose, name)
    expected = hf_logits(model, IDS, POSITIONS)
    cached = model(input_ids=IDS[None], use_cache=True).past_key_values
    number = next(i for i, kind in enumerate(model.config.layer_types) if kind == LINEAR)
    of_layer = cached.layers[number]
    wanted = {
        "conv": of_layer.conv_states[0][0].mT[1:],
        "recurrent": of_layer.recurrent_states[0][0],
    }
    for size in (1, 3, 64, 65):
        # What an earlier request left is not read.
        states = [spec.allocate(5, 16, "cpu") for spec in program.specs]
        for spec, tensors in zip(program.specs, states, strict=True):
            if spec.per_sequence:
                next(iter(tensors.values())).fill_(7.0)
        assert error(paged_logits(program, IDS, chunks_of(size), states), expected) < 1e-4, size
        found = {
            spec.kind: tensors[spec.roles[0]][0]
            for spec, tensors in zip(program.specs, states, strict=True)
            if f"layers.{number}." in spec.name
        }
        assert found.keys() == wanted.keys()
        for kind, state in found.items():
            assert error(state, wanted[kind]) < 1e-4, (size, kind)


@pytest.mark.rotating
@pytest.mark.parametrize(("whose", "name"), some({("stock", "qwen3_next")}, KINDS))
def test_a_served_model_gives_the_text_that_transformers_generates(whose: str, name: str) -> None:
    model, prompts = theirs(name), prompts_of(20, 40)
    expected = generated(model, prompts, 10)
    # Ragged batches of chunks: more requests than slots, and prompts longer than a step.
    text, _ = served(made(whose, name), prompts, 10, max_num_batched_tokens=23, max_num_seqs=7)
    assert text == expected


@pytest.mark.rotating
@pytest.mark.parametrize(("whose", "name"), some({("ours", "qwen3_5_moe")}, KINDS))
def test_preempted_and_aborted_requests_leave_others_their_tokens(whose: str, name: str) -> None:
    settings = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config = EngineConfig(**settings, num_blocks=9, seed=0, options=EAGER, self_check=False)
    engine = Engine(config, module=made(whose, name), progress=False)
    prompts = prompts_of(12, 40)
    aborts = {4: "1", 9: "5", 30: "8"}
    found = run(engine, requests_of(engine, prompts, 24), aborts=aborts)
    assert engine.stats().preemptions > 1
    for i, (tokens, whole) in enumerate(
        zip(found, generated(theirs(name), prompts, 24), strict=True)
    ):
        assert tokens == (whole[: len(tokens)] if str(i) in aborts.values() else whole), i
    assert all(len(found[int(i)]) < 24 for i in aborts.values())


def test_shared_prefixes_and_drafts_give_the_same_text() -> None:
    prompts = prompts_of(4, 12, common=90)
    expected = generated(theirs("qwen3_5", **LONG), prompts, 8)
    settings = {"max_model_len": 128, "max_num_seqs": 4, "options": EAGER}
    drafts = {"speculative": "ngram", "speculative_tokens": 2}
    for more in ({}, drafts):
        text, num_cached = served(
            made("ours", "qwen3_5", **LONG), prompts * 2, 8, **settings, **more
        )
        assert text == expected * 2
        assert num_cached >= 4 * 64  # from snapshots of the state


def test_without_snapshots_there_is_no_prefix_cache_and_the_report_says_why() -> None:
    LLM(made("ours", "qwen3_5"), state_snapshots=0, progress=False, options=EAGER)
    notes = [note for note in atomc.reports()[-1].notes if note.startswith("no prefix cache")]
    assert len(notes) == 1
    assert "model.layers.0.linear_attn keeps one state per sequence" in notes[0]


def formula(linear: int, full: int, experts: bool) -> dict[str, int]:
    """Of a model with so many layers of either kind, as served in fp32."""
    layers = linear + full
    return {
        "conv_gated_delta_rule_update": linear,
        "qk_norm_rope_kv_write": full,
        "paged_attention": full,
        "rms_norm": 1,
        "rms_norm_gated": linear,
        "add_rms_norm": 2 * layers,
        "silu_and_mul": layers,
        "sigmoid_and_mul": full + layers * experts,
        "topk_route": layers * experts,
        "moe_experts": layers * experts,
        # All projections of one input are one: into attention or a gated delta net and out of it,
        # into an MLP, with that of the router and of the shared expert's gate, and out of it.
        "linear": 4 * layers + 1,
    }


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("whose", "name", "layers"),
    some(
        {("stock", "qwen3_next", 3)},
        [(*kind, layers) for kind in KINDS if kind[1] in NAMES for layers in (3, 8)],
    ),
)
def test_the_counts_follow_the_formula(whose: str, name: str, layers: int) -> None:
    types = [LINEAR, "full_attention", LINEAR, LINEAR] * 2
    differs = {"num_hidden_layers": layers, "layer_types": types[:layers]}
    report = compile_model(made(whose, name, **differs), EAGER).report
    linear = types[:layers].count(LINEAR)
    expected = formula(linear, layers - linear, experts=name != "qwen3_5")
    assert {op: report.num_ops.get(op, 0) for op in expected} == expected
    assert {"attention", "rope", "gated_delta_rule", "causal_conv1d"}.isdisjoint(report.num_ops)
    assert report.matches["rope_partial"] == 2 * (layers - linear)


# ---- stock layers that are not entered, or not always


def other_forward(layer: nn.Module, x: Tensor, *given: object, **named: object) -> Tensor:
    return type(layer).__base__.forward(layer, x, *given, **named) * 1.01


class OtherParameter:
    def __init__(self, *given: object) -> None:
        super().__init__(*given)
        self.skip = nn.Parameter(torch.zeros(3))


OPS = "ops.causal_conv1d and ops.gated_delta_rule"


def failing_forward(layer: nn.Module, x: Tensor, scale: float) -> Tensor:
    raise AssertionError


@pytest.mark.parametrize(
    ("members", "bases", "sentence"),
    [
        (
            {"forward": other_forward},
            (),
            f"computes something else than {OPS}: results differ by 9.9e-03 of the largest number, "
            "and rounding explains 1e-04",
        ),
        ({}, (OtherParameter,), f"has skip, which {OPS} has no operand for"),
        (
            {"forward": failing_forward},
            (),
            f"cannot be compared with {OPS}: TypeError: failing_forward() missing 1 required "
            "positional argument: 'scale'",
        ),
    ],
)
def test_a_class_that_is_no_gated_delta_net_is_refused_with_the_difference(
    members: dict[str, object], bases: tuple[type, ...], sentence: str
) -> None:
    model = theirs("qwen3_5")
    layer = model.model.layers[0].linear_attn
    layer.__class__ = type("Other", (*bases, type(layer)), members)
    with pytest.raises(ValueError) as raised:
        wrap_stock(model)
    assert str(raised.value) == f"Qwen3_5ForCausalLM: Other {sentence}"


def test_another_activation_is_refused() -> None:
    with pytest.raises(ValueError) as raised:
        wrap_stock(theirs("qwen3_next", hidden_act="gelu"))
    assert str(raised.value) == (
        "Qwen3NextForCausalLM: Qwen3NextGatedDeltaNet has the activation 'gelu' behind its "
        "convolution, supported is 'silu'"
    )


def test_a_layer_without_the_parts_of_a_gated_delta_net_is_refused() -> None:
    model = theirs("qwen3_5", layer_types=[LINEAR, LINEAR])
    layer = model.model.layers[1].linear_attn
    layer.gate_proj = layer.in_proj_z
    del layer.in_proj_z
    with pytest.raises(ValueError, match="has layers of kind linear_attention, only full_attent"):
        wrap_stock(model)


@pytest.mark.parametrize("name", [*NAMES, *STOCK])
def test_padding_and_a_cache_are_those_of_the_class(name: str) -> None:
    model = theirs(name)
    layer = next(each for each in model.model.layers if hasattr(each, "linear_attn")).linear_attn
    x, mask = torch.randn(2, 9, 64), torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    own = type(layer).forward
    expected, unmasked = own(layer, x, attention_mask=mask), own(layer, x)
    text = generated(model, [[5, 7, 9, 11]], 6)
    wrap_stock(model)
    assert error(layer(x, attention_mask=mask), expected) < 1e-5
    assert error(unmasked, expected) > 0.01

    with own_attention(model):
        assert torch.equal(layer(x, attention_mask=mask), expected)
        assert generated(model, [[5, 7, 9, 11]], 6) == text
    packed = {"cu_seq_lens_q": torch.tensor([0, 9])}
    if transformers.__version__.startswith("5.17."):  # without its library it reads one sequence
        assert torch.equal(layer(x, **packed), own(layer, x, **packed))
    else:
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            layer(x, **packed)
    cached = transformers.DynamicCache(config=model.config)
    name_of_cache = list(inspect.signature(own).parameters)[2]  # another one since 5.24
    assert torch.equal(layer(x, **{name_of_cache: cached}), own(layer, x))
    assert cached.layers[layer.layer_idx].recurrent_states[0].abs().max() > 0


# ---- torch.compile in the user's own program


@pytest.mark.rotating
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 traces is_exporting() as true, and the class solves no triangular system",
)
def test_compiled_as_it_is_a_class_unrolls_its_chunks_and_the_report_says_so() -> None:
    model = theirs("qwen3_5")
    expected = hf_logits(model, IDS, POSITIONS)
    compiled = torch.compile(model, backend="atom", options=EAGER, fullgraph=True)
    assert error(hf_logits(compiled, IDS, POSITIONS), expected) < 1e-4
    report = atomc.reports()[-1]
    assert "gated_delta_rule" not in report.num_ops
    [miss] = report.misses("gated_delta_rule")
    assert miss.module_path.endswith("layers.0.linear_attn")
    assert miss.found == "the loop over chunks of the class, unrolled into this graph"
    assert "atomc.prepare(model)" in report.why("gated_delta_rule")


@pytest.mark.rotating
def test_a_prepared_class_calls_the_op_while_it_is_compiled() -> None:
    model = theirs("qwen3_5")
    expected = hf_logits(model, IDS, POSITIONS)
    text = generated(model, [[5, 7, 9, 11]], 4)
    atomc.prepare(model)
    assert torch.equal(hf_logits(model, IDS, POSITIONS), expected)
    assert generated(model, [[5, 7, 9, 11]], 4) == text
    compiled = torch.compile(model, backend="atom", options=EAGER, fullgraph=True)
    assert error(hf_logits(compiled, IDS, POSITIONS), expected) < 1e-4
    report = atomc.reports()[-1]
    assert report.num_ops["gated_delta_rule"] == report.num_ops["causal_conv1d"] == 1
    assert not report.misses("gated_delta_rule")

    atomc.unprepare(model)
    assert "forward" not in vars(model.model.layers[0].linear_attn)


def test_a_class_that_cannot_be_prepared_is_left_alone_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = theirs("qwen3_next", hidden_act="gelu")
    atomc.prepare(model)
    assert "forward" not in vars(model.model.layers[0].linear_attn)
    [line] = [r.getMessage() for r in caplog.records if r.name == "atomc"]
    assert line.startswith("prepare: Qwen3NextForCausalLM: Qwen3NextGatedDeltaNet has the activat")


# ---- checkpoints


def test_a_text_model_loads_from_a_checkpoint_with_images(tmp_path: Path) -> None:
    model = theirs("qwen3_5")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    moved = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    moved |= {"model.visual.blocks.0.norm1.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3)}
    save_file(moved, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    text = {k: v for k, v in config.items() if k not in ("architectures", "dtype")}
    whole = {"model_type": "qwen3_5", "architectures": config["architectures"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    assert error(load(tmp_path)(IDS, POSITIONS), hf_logits(model, IDS, POSITIONS)) < 1e-4


@pytest.mark.parametrize("name", [*NAMES, *STOCK])
def test_convolutions_gates_and_the_head_stay_in_16_bits(name: str) -> None:
    model = theirs(name)
    expected = hf_logits(model, IDS, POSITIONS)
    atomc.quantize(model, "int8")
    quantized = {
        path.rpartition(".")[2]
        for path, m in model.named_modules()
        if isinstance(m, QuantizedLinear)
    }
    of_delta_net = {
        "qwen3_next": {"in_proj_qkvz", "out_proj"},
        "qwen3_5": {"in_proj_qkv", "in_proj_z", "out_proj"},
        "qwen3_5_moe": {"in_proj_qkv", "in_proj_z", "out_proj"},
        "olmo_hybrid": {"g_proj"},  # others have the names of attention
    }[name]
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert quantized == {"gate_proj", "up_proj", "down_proj"} | of_delta_net | attention
    logits = wrap_stock(model)(IDS, POSITIONS)
    assert 1e-5 < median_error(logits, expected) < 0.1


CONFIG = TINY | HYBRID | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        (
            {"linear_num_key_heads": 3},
            "linear_num_value_heads 4 is not a multiple of linear_num_key_heads 3",
        ),
        (
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim 1 convolves nothing, expected at least 2",
        ),
        (
            {"layer_types": [LINEAR, "sliding_attention"]},
            "layer_types ['linear_attention', 'sliding_attention'] are not 2 of 'linear_attention' "
            "or 'full_attention'",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.05}},
            "partial_rotary_factor 0.05 rotates 0 of 16 columns, rotary positions need pairs of "
            "columns",
        ),
        ({"text_config": [1]}, "text_config [1] is not an object"),
    ],
)
def test_an_unsupported_config_is_refused_in_one_sentence(
    differs: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError) as raised:
        create_model(CONFIG | differs, device="meta")
    assert str(raised.value) == f"qwen3_5_text: {sentence}"


@pytest.mark.parametrize("interval", [3, None])
def test_without_layer_types_every_fourth_layer_or_as_the_config_says_has_attention(
    interval: int | None,
) -> None:
    given = {"num_hidden_layers": 9} | ({"full_attention_interval": interval} if interval else {})
    expected = transformers.AutoConfig.for_model("qwen3_next", **given).layer_types
    assert list(hybrid_layer_types(given)) == expected


def test_draft_layers_are_not_saved_by_transformers(tmp_path: Path) -> None:
    theirs("qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no draft layers: expected tensors mtp\.\*"):
        load(tmp_path, draft_layers=1)
