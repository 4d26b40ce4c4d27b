"""Models with Mamba-2 mixers and with short convolutions: the classes of transformers against
themselves on the same random weights, eager, compiled and served.
"""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from state_toy import requests_of, run
from test_mla_attention import paged_logits
from test_mla_models import generated, prompts_of, served
from test_models import error, hf_logits, hf_model
from test_moe_models import EAGER, median_error
from torch import Tensor, nn

import atomc
from atomc.program import Program, compile_model
from atomc.runtime.engine import Engine, EngineConfig
from atomc.stock.adapter import StockModel, wrap_stock
from atomc.stock.mamba import MIXERS

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.xdist_group("mamba_models"), pytest.mark.usefixtures("compiled_once")]

TOKENS = 70  # more than a chunk of each kernel has
IDS = torch.randint(3, 96, (TOKENS,), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(TOKENS)
ALTERNATING = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "eos_token_id": None,
}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "eos_token_id": None}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 24,
    "eos_token_id": None,
}
ZAMBA = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "n_mamba_heads": 4,
    "mamba_ngroups": 2,
    "mamba_d_state": 12,
    "chunk_size": 16,
    "adapter_rank": 8,
    "eos_token_id": None,
}
# name -> model_type and what differs from test_models.TINY
KINDS = {
    "granite": (
        "granitemoehybrid",
        ALTERNATING
        | MAMBA
        | {
            "num_local_experts": 4,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.8,
            "logits_scaling": 2.0,
        },
    ),
    "granite, biases and limits": (
        "granitemoehybrid",
        ALTERNATING
        | MAMBA
        | {
            "num_local_experts": 0,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "time_step_limit": (0.3, 1.2),
        },
    ),
    "lfm2": ("lfm2", CONVOLUTIONS),
    "lfm2, bias": ("lfm2", CONVOLUTIONS | {"conv_bias": True, "conv_L_cache": 4}),
    "lfm2_moe": (
        "lfm2_moe",
        CONVOLUTIONS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": (
        "falcon_h1",
        MAMBA
        | {
            "mamba_d_ssm": 96,
            "ssm_in_multiplier": 0.7,
            "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
            "mamba_rms_norm": False,
        },
    ),
    "falcon_h1, norm": (
        "falcon_h1",
        MAMBA | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "zamba2": ("zamba2", ZAMBA),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 12,
            "chunk_size": 16,
            "eos_token_id": None,
        },
    ),
}
WITHOUT_ATTENTION = "mamba2"
FAST = ("granite", "lfm2")


def some(fast: tuple[str, ...] = FAST) -> list[Any]:
    """The names: those of one test that run per change, and the others marked slow."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in KINDS]


def theirs(name: str) -> nn.Module:
    """The transformers model of this kind, whose states last for some tens of tokens."""
    model_type, differs = KINDS[name]
    model = hf_model(model_type, **differs)
    generator = torch.Generator().manual_seed(2)
    for path, parameter in model.named_parameters():
        if path.endswith("A_log"):
            parameter.data.normal_(-3.0, 1.0, generator=generator)
        if path.endswith((".D", "dt_bias")):
            parameter.data.normal_(0.0, 1.0, generator=generator)
    return model.requires_grad_(False)


def text_of(name: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers generates greedily. With limits of time steps, without its cache: its one-step
    form does not apply them.
    """
    model = theirs(name)
    model.generation_config.use_cache = "limits" not in name
    return generated(model, prompts, count)


def wrapped(name: str) -> StockModel:
    return wrap_stock(theirs(name))


@cache
def program_of(name: str) -> Program:
    return compile_model(wrapped(name), EAGER)


def mixers_of(model: nn.Module) -> list[str]:
    """The names of the modules with state of sequences, in the order of layers."""
    return [
        path
        for path, module in model.named_modules()
        if {"conv1d", "in_proj"} <= module._modules.keys()
        or {"conv", "in_proj"} <= module._modules.keys()
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_wrapped_class_gives_the_same_logits(name: str) -> None:
    model = theirs(name)
    ids, positions = IDS.view(2, 35), POSITIONS[:35].expand(2, 35)
    expected = [
        hf_logits(model, *given)
        for given in ((IDS, POSITIONS), (IDS[:1], POSITIONS[:1]), (ids, positions))
    ]
    ours = wrap_stock(model)
    assert error(ours(IDS, POSITIONS), expected[0]) < 1e-4
    assert error(ours(IDS[:1], POSITIONS[:1]), expected[1]) < 1e-4
    assert error(ours(ids, positions), expected[2]) < 1e-4
    handles = [path for path, _ in ours.named_buffers() if path.endswith(".conv_state")]
    assert len(handles) == len(mixers_of(model)) > 0


@pytest.mark.parametrize("name", FAST)
def test_bf16_is_as_close_to_fp32_as_the_class_is(name: str) -> None:
    expected = hf_logits(theirs(name), IDS, POSITIONS)
    model = theirs(name).to(torch.bfloat16)
    limit = 1.5 * median_error(hf_logits(model, IDS, POSITIONS), expected)
    logits = wrap_stock(model)(IDS, POSITIONS)
    assert logits.dtype == torch.bfloat16
    assert median_error(logits, expected) < limit


@pytest.mark.parametrize("name", some())
def test_a_compiled_model_computes_what_the_eager_one_does(name: str) -> None:
    model = wrapped(name)
    expected = model(IDS, POSITIONS)
    compiled = torch.compile(model, backend="atom", options=EAGER, fullgraph=True)
    assert error(compiled(IDS, POSITIONS), expected) < 1e-4
    layers, report = len(mixers_of(model)), atomc.reports()[-1]
    assert report.num_ops["causal_conv1d"] == layers
    assert report.num_ops.get("ssm_scan", 0) == (0 if name.startswith("lfm2") else layers)


def chunks_of(size: int) -> tuple[int, ...]:
    whole, rest = divmod(TOKENS, size)
    return (size,) * whole + ((rest,) if rest else ())


@pytest.mark.parametrize("name", some())
def test_chunks_give_the_logits_and_the_state_of_the_cache_of_transformers(name: str) -> None:
    model, program = theirs(name), program_of(name)
    expected = hf_logits(model, IDS, POSITIONS)
    out = model(input_ids=IDS[None], use_cache=True)
    cached = out.get("past_key_values", out.get("cache_params"))
    path = mixers_of(model)[0]
    of_layer = cached.layers[model.get_submodule(path).layer_idx]
    wanted = {"conv": of_layer.conv_states[0][0].mT[1:]}
    if not name.startswith("lfm2"):
        wanted["recurrent"] = of_layer.recurrent_states[0][0]
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
            if spec.name.endswith(path)
        }
        assert found.keys() == wanted.keys()
        for kind, state in found.items():
            assert error(state, wanted[kind]) < 1e-4, (size, kind)


@pytest.mark.rotating
@pytest.mark.parametrize("name", some())
def test_a_served_model_gives_the_text_that_transformers_generates(name: str) -> None:
    prompts = prompts_of(20, 40)
    # Ragged batches of chunks: more requests than slots, and prompts longer than a step.
    text, _ = served(wrapped(name), prompts, 10, max_num_batched_tokens=23, max_num_seqs=7)
    assert text == text_of(name, prompts, 10)


def test_a_saved_model_with_an_infinite_limit_and_no_maximum_length_is_served(tmp_path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 16}
    settings = {"state_size": 8, "n_groups": 1, "chunk_size": 8, "vocab_size": 96}
    tokens = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 0}
    config = transformers.Mamba2Config(
        **sizes, **settings, **tokens, time_step_limit=(0.0, float("inf"))
    )
    torch.manual_seed(0)
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    assert '"__float__": "Infinity"' in (tmp_path / "config.json").read_text()
    llm = atomc.LLM(tmp_path, dtype="float32", device="cpu", options=EAGER, progress=False)
    assert llm.engine.max_len == 2**20
    own = transformers.Mamba2ForCausalLM.from_pretrained(tmp_path)
    assert own.config.time_step_limit[1] == float("inf")
    ids = own.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    (answer,) = llm.generate([[5, 6, 7]], atomc.SamplingParams(max_tokens=6))
    assert list(answer.token_ids) == ids[0, 3:].tolist()


@pytest.mark.rotating
@pytest.mark.parametrize("name", some(("granite",)))
def test_preempted_and_aborted_requests_leave_others_their_tokens(name: str) -> None:
    settings = {"max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    config = EngineConfig(**settings, num_blocks=9, seed=0, options=EAGER, self_check=False)
    engine = Engine(config, module=wrapped(name), progress=False)
    prompts = prompts_of(12, 40)
    aborts = {4: "1", 9: "5", 30: "8"}
    found = run(engine, requests_of(engine, prompts, 24), aborts=aborts)
    # Without blocks there is nothing to lack.
    assert (engine.stats().preemptions > 1) != (name == WITHOUT_ATTENTION)
    whole = text_of(name, prompts, 24)
    for i, (tokens, all_of_it) in enumerate(zip(found, whole, strict=True)):
        aborted = str(i) in aborts.values()
        assert tokens == (all_of_it[: len(tokens)] if aborted else all_of_it), i
    assert any(len(found[int(i)]) < 24 for i in aborts.values())


@pytest.mark.rotating
@pytest.mark.parametrize("name", some(("lfm2",)))
def test_requests_share_prefixes_by_snapshots_and_rejected_drafts_change_nothing(name: str) -> None:
    prompts = prompts_of(4, 12, common=90) * 2
    expected = text_of(name, prompts, 8)
    settings = {"max_model_len": 128, "max_num_seqs": 4}
    for more in ({}, {"speculative": "ngram", "speculative_tokens": 2}):
        text, num_cached = served(wrapped(name), prompts, 8, **settings, **more)
        assert text == expected
        assert num_cached >= 4 * 64


@pytest.mark.parametrize("name", some())
def test_a_program_has_one_op_and_one_state_for_each_layer(name: str) -> None:
    program = program_of(name)
    layers, report = len(mixers_of(wrapped(name))), program.report
    scans = 0 if name.startswith("lfm2") else layers
    assert report.num_ops["causal_conv1d_update"] == layers
    assert report.num_ops.get("ssm_scan_update", 0) == scans
    assert {"ssm_scan", "causal_conv1d", "attention"}.isdisjoint(report.num_ops)
    kinds = [spec.kind for spec in program.specs]
    assert (kinds.count("conv"), kinds.count("recurrent")) == (layers, scans)
    assert kinds.count("kv") == report.num_ops.get("paged_attention", 0)
    assert ("kv" in kinds) != (name == WITHOUT_ATTENTION)
    assert all(
        tensor.dtype == torch.float32
        for spec in program.specs
        if spec.kind == "recurrent"
        for tensor in spec.tensors
    )


def test_a_layer_runs_as_its_class_has_it_with_a_cache_a_mask_or_another_attention() -> None:
    model = wrapped("granite").hf_model
    layer, x = model.model.layers[0].mamba, torch.randn(2, 9, 64)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0  # padding in front of the first

    def of_class(**given: object) -> Tensor:
        found: Tensor = type(layer).forward(layer, x, **given)
        return found

    assert error(layer(x), of_class()) < 1e-4
    layer.__dict__["entered_as"] = replace(MIXERS, compute=lambda *_: x / 0)
    assert layer(x).isinf().any()
    assert torch.equal(layer(x, attention_mask=mask), of_class(attention_mask=mask))
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    name = list(inspect.signature(type(layer).forward).parameters)[2]  # another one since 5.24
    found, expected = layer(x, **{name: caches[0]}), of_class(**{name: caches[1]})
    assert torch.equal(found, expected)
    states = [cache.layers[0].recurrent_states[0] for cache in caches]
    assert torch.equal(*states) and states[0].any()
    model.set_attn_implementation("eager")
    assert torch.equal(layer(x), of_class())


@pytest.mark.slow
def test_a_class_that_is_compiled_as_it_is_computes_what_it_does_eagerly() -> None:
    model = theirs("granite")
    expected = hf_logits(model, IDS, POSITIONS)
    compiled = torch.compile(model, backend="atom", options=EAGER)
    assert error(hf_logits(compiled, IDS, POSITIONS), expected) < 1e-4
    assert "ssm_scan" not in atomc.reports()[-1].num_ops


# ---- what is refused


def test_a_layer_that_computes_something_else_is_refused_with_the_difference(monkeypatch) -> None:
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
    from transformers.models.lfm2 import modeling_lfm2 as lfm2

    scan = granite.mamba2_chunk_scan
    with monkeypatch.context() as patch:
        patch.setattr(granite, "mamba2_chunk_scan", lambda *a, D, **k: scan(*a, D=2 * D, **k))
        with pytest.raises(
            ValueError,
            match=r"GraniteMoeHybridMambaLayer computes something else than ops.causal_conv1d and "
            r"ops.ssm_scan: results differ by [\d.]+e-02 of the largest number",
        ):
            wrapped("granite")
    with monkeypatch.context() as patch:
        patch.setattr(
            lfm2.Lfm2ShortConv, "forward", lambda self, hidden_states, **_: 2 * hidden_states
        )
        with pytest.raises(ValueError, match=r"Lfm2ShortConv computes something else than ops"):
            wrapped("lfm2")
    with monkeypatch.context() as patch:
        patch.setattr(lfm2.Lfm2ShortConv, "forward", lambda self, hidden_states, **_: 1 / 0)
        with pytest.raises(
            ValueError, match=r"cannot be compared with ops.causal_conv1d: ZeroDivisionError"
        ):
            wrapped("lfm2")


def test_a_mixer_with_another_activation_or_another_parameter_is_refused(monkeypatch) -> None:
    from transformers.models.bamba import modeling_bamba as bamba

    with pytest.raises(
        ValueError, match=r"BambaMixer has the activation 'gelu' behind its convolution"
    ):
        wrap_stock(hf_model("bamba", **KINDS["bamba"][1] | {"hidden_act": "gelu"}))
    build = bamba.BambaMixer.__init__

    def with_gain(self: Any, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        self.gain = nn.Parameter(torch.ones(3))

    monkeypatch.setattr(bamba.BambaMixer, "__init__", with_gain)
    with pytest.raises(ValueError, match=r"BambaMixer has gain, which ops.causal_conv1d and ops"):
        wrap_stock(hf_model("bamba", **KINDS["bamba"][1]))


def test_a_layer_of_a_kind_that_nothing_was_entered_for_is_refused(monkeypatch) -> None:
    from atomc.stock import adapter

    monkeypatch.setattr(adapter, "SHORT_CONVS", replace(adapter.SHORT_CONVS, has=lambda _: False))
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has layers of kind conv, only"):
        wrapped("lfm2")
