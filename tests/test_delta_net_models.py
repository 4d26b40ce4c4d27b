"""Models with gated delta nets: our files and the stock classes against transformers on the same
random weights, eager, compiled and served.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from test_mla_attention import paged_logits
from test_mla_models import generated, prompts_of, served
from test_models import TINY, error, hf_logits, hf_model
from test_moe_models import EAGER, median_error
from test_state_kinds import requests_of, run
from torch import Tensor, nn

import atomc
from atomc import models
from atomc.models.stock_delta_net import LAYER_TYPE as LINEAR
from atomc.models.loader import load
from atomc.program import Program, compile_model
from atomc.quantization.linear import QuantizedLinear
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.llm import LLM
from atomc.runtime.sampling.sampling_params import SamplingParams
from atomc.runtime.self_check import own_attention

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("delta_net_models")

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
        return models.wrap_stock(model)
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
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in model.named_parameters()]
    for length in (1, TOKENS):
        ids, positions = IDS[:length], POSITIONS[:length]
        assert error(ours(ids, positions), hf_logits(model, ids, positions)) < 1e-4
    ids, positions = IDS.view(2, 35), POSITIONS[:35].expand(2, 35)
    assert error(ours(ids, positions), hf_logits(model, ids, positions)) < 1e-4


@pytest.mark.parametrize("name", [*OURS, *STOCK])
def test_a_wrapped_class_gives_the_same_logits(name: str) -> None:
    model = theirs(name)
    expected = hf_logits(model, IDS, POSITIONS)
    wrapped = models.wrap_stock(model)
    assert error(wrapped(IDS, POSITIONS), expected) < 1e-4
    handles = {path.rpartition(".")[2] for path, _ in wrapped.named_buffers()}
    assert {"conv_state", "delta_state", "kv"} <= handles


@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_as_close_to_fp32_as_hugging_face_is(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, IDS, POSITIONS)
    in_bf16 = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    limit = 1.5 * median_error(hf_logits(in_bf16, IDS, POSITIONS), expected)
    for ours in (load(tmp_path, dtype=torch.bfloat16), models.wrap_stock(in_bf16)):
        with torch.no_grad():
            logits = ours(IDS, POSITIONS)
        assert logits.dtype == torch.bfloat16
        assert median_error(logits, expected) < limit


@pytest.mark.parametrize(
    ("whose", "name", "dtype"),
    some(
        {("ours", "qwen3_next", torch.float32), ("stock", "qwen3_5", torch.bfloat16)},
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


@pytest.mark.parametrize(
    ("whose", "name"), some({("ours", "qwen3_5_moe"), ("stock", "qwen3_next")}, KINDS)
)
def test_chunks_give_the_logits_and_the_state_of_the_cache_of_transformers(
    whose: str, name: str
) -> None:
    model, program = theirs(name), program_of(whose, name)
    expected = hf_logits(model, IDS, POSITIONS)
    cached = model(input_ids=IDS[None], use_cache=True).past_key_values
    number = next(i for i, kind in enumerate(model.config.layer_types) if kind == LINEAR)
    of_layer = cached.layers[number]
    wanted = {"conv": of_layer.conv_states[0][0].mT[1:], "recurrent": of_layer.recurrent_states[0][0]}
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


@pytest.mark.parametrize(
    ("whose", "name"), some({("ours", "qwen3_next"), ("stock", "qwen3_5")}, KINDS)
)
def test_a_served_model_gives_the_text_that_transformers_generates(whose: str, name: str) -> None:
    model, prompts = theirs(name), prompts_of(20, 40)
    expected = generated(model, prompts, 10)
    # Ragged batches of chunks: more requests than slots, and prompts longer than a step.
    text, num_cached = served(
        made(whose, name), prompts, 10, max_num_batched_tokens=23, max_num_seqs=7
    )
    assert text == expected and not num_cached


@pytest.mark.parametrize(
    ("whose", "name"), some({("ours", "qwen3_5_moe")}, KINDS)
)
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


def test_a_prefix_cache_is_off_and_the_report_says_why() -> None:
    llm = LLM(made("ours", "qwen3_5"), max_model_len=64, progress=False, options=EAGER)
    assert not llm.engine.scheduler.has_prefix_cache

