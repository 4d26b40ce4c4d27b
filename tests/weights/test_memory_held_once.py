"""Weights are held once: in the runtime a prepared weight replaces its original, and experts have
one form everywhere.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_experts import CONFIGS, IDS, POSITIONS, random_model
from torch import Tensor, nn
from tracked_bytes import TrackedBytes

import atomc
from atomc import ops
from atomc import program as programs
from atomc.loading import dummy_weights, loader
from atomc.loading.create_model import create_model
from atomc.ops import GroupStep, Prepared, Step, Tokens
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import compile_for, plan_step
from atomc.platform import Platform
from atomc.program import Program, compile_model
from atomc.quantization.stored_size import stored_bytes
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.weights import registry as weights

EAGER = {"glue": "eager", "cache": False}
ALL = Tokens()


def turned(weight: Tensor) -> Prepared:
    return Prepared((weight.detach().mT.contiguous(),))


def turned_and_scaled(weight: Tensor) -> Prepared:
    return Prepared((2 * weight.detach().mT,))


def experts_of_turned(x: Tensor, ids: Tensor, weights: Tensor, w13: Any, w2: Any, **rest: Any):
    return ops.moe_experts.reference(x, ids, weights, w13[0].mT, w2[0].mT, **rest)


def experts_of_scaled(x: Tensor, ids: Tensor, weights: Tensor, w13: Any, w2: Any, **rest: Any):
    return ops.moe_experts.reference(x, ids, weights, w13[0].mT / 2, w2[0].mT / 2, **rest)


def linear_of_turned(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight[0].mT, bias)


@contextmanager
def kernel(op: ops.Op, provider: str, function: Any, **protocol: Any) -> Iterator[None]:
    """A kernel that exists for one test."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs)

    kernels = [*op.kernels]
    op.kernel(provider, **protocol)(made)
    try:
        yield
    finally:
        op.kernels[:] = kernels


@contextmanager
def turning_experts(
    provider: str = "turned", prepare: Any = turned, tokens: Tokens = ALL
) -> Iterator[None]:
    function = experts_of_turned if prepare is turned else experts_of_scaled
    prepares = {"w13": prepare, "w2": prepare}
    with kernel(ops.moe_experts, provider, function, prepare=prepares, tokens=tokens):
        yield


@contextmanager
def turning_linears() -> Iterator[None]:
    with kernel(ops.linear, "turned", linear_of_turned, prepare={"weight": turned}):
        yield


def providers(*names: str) -> dict[str, Any]:
    return {**EAGER, "providers": (*names, "torch")}


def step() -> Step:
    count = len(IDS)
    return Step(
        IDS,
        POSITIONS,
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.arange(count),
        (GroupStep(torch.arange(count), torch.zeros(1, 1, dtype=torch.int32)),),
        torch.zeros(1, dtype=torch.int64),
    )


def logits(program: Program) -> Tensor:
    program.bind([spec.allocate(1, 16, "cpu") for spec in program.specs])
    with torch.no_grad():
        return program(step())


def experts(report: atomc.Report) -> dict[str, str]:
    return {c.tokens: c.chosen for c in report.kernels if c.op == "moe_experts"}


def refusals(report: atomc.Report, op: str, provider: str) -> set[str]:
    return {
        reason
        for choice in report.kernels
        if choice.op == op
        for name, reason in choice.refused
        if name == provider
    }


def made_tracked(monkeypatch: pytest.MonkeyPatch, tracked: list[TrackedBytes]) -> None:
    """Track the making of packed and prepared weights; Dynamo does not run under the mode."""
    made = programs._made

    def inside(*args: Any, **kwargs: Any) -> Any:
        tracked.append(TrackedBytes())
        with tracked[-1]:
            return made(*args, **kwargs)

    monkeypatch.setattr(programs, "_made", inside)


# In the runtime


@pytest.mark.rotating
def test_prepared_experts_and_linears_replace_the_originals_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = random_model("qwen3_moe")(IDS, POSITIONS)
    model = random_model("qwen3_moe")
    largest = max(p.nbytes for p in model.parameters())
    total = sum(p.nbytes for p in model.parameters())
    tracked: list[TrackedBytes] = []
    made_tracked(monkeypatch, tracked)
    with turning_experts(), turning_linears():
        program = compile_model(model, providers("turned"), owned=True)
        torch.testing.assert_close(logits(program), expected)
    [found] = tracked
    read = model.model.embed_tokens.weight.nbytes
    assert program.replaced_bytes > 0.8 * total - read
    assert found.peak - found.before <= 2 * largest  # a pack, or a prepared weight
    assert abs(found.held() - found.before) < 4096
    freed = f"{program.replaced_bytes / 2**20:.1f} MiB of originals are freed"
    assert any(freed in note for note in program.report.notes)


@pytest.mark.rotating
def test_weights_of_a_module_that_its_owner_keeps_are_not_freed() -> None:
    model = random_model("qwen3_moe")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with turning_linears():
        program = compile_model(model, providers("turned"))
    assert program.replaced_bytes == 0 < program.prepared_bytes
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_served_model_refuses_to_save_load_or_lend_the_weights_that_were_freed() -> None:
    model = random_model("qwen3_moe")
    with turning_experts():
        compile_model(model, providers("turned"), owned=True)
    layer = model.model.layers[0]
    for refused in (
        model.state_dict,
        layer.mlp.experts.state_dict,
        lambda: model.load_state_dict({}, strict=False),
    ):
        with pytest.raises(RuntimeError, match="load the checkpoint again"):
            refused()
    assert layer.input_layernorm.state_dict()  # which was not freed
    with pytest.raises(NotImplementedError, match="meta"):
        layer.mlp.experts.gate_up_proj.cpu()


@pytest.mark.rotating
def test_two_ranges_that_want_two_layouts_of_experts_get_that_of_the_first() -> None:
    expected = random_model("qwen3_moe")(IDS, POSITIONS)
    with turning_experts(), turning_experts("scaled", turned_and_scaled, Tokens(9)):
        program = compile_model(
            random_model("qwen3_moe"), providers("scaled", "turned"), owned=True
        )
        torch.testing.assert_close(logits(program), expected)
    assert experts(program.report) == {"1 to 8": "turned", "9 and more": "turned"}
    assert {
        "it needs `w13` in another layout than turned for 1 to 8 tokens reads, and this weight is "
        "held once"
    } == {
        reason
        for reason in refusals(program.report, "moe_experts", "scaled")
        if not reason.startswith("is meant for")
    }


def test_experts_stay_as_they_are_where_a_range_has_no_kernel_for_another_layout() -> None:
    model = random_model("qwen3_moe")
    with turning_experts(tokens=Tokens(1, 8)):
        program = compile_model(model, providers("turned"), owned=True)
    assert set(experts(program.report).values()) == {"torch"}
    assert program.replaced_bytes == program.prepared_bytes == 0
    assert any(
        "than torch for 9 and more tokens reads" in reason
        for reason in refusals(program.report, "moe_experts", "turned")
    )


@pytest.mark.rotating
@pytest.mark.parametrize("small", [False, True])
def test_a_head_that_is_tied_to_the_embedding_is_not_relaid_on_a_gpu(
    small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr("atomc.compiler.weight_forms.SMALL", 1)
    config = CONFIGS["qwen3_moe"] | {"tie_word_embeddings": True}
    model = loader.ready(create_model(config, torch.bfloat16, "meta"))
    with turning_linears():
        program = compile_model(
            model, providers("turned", "triton"), platform=Platform.named("h200"), owned=True
        )
    heads = {c.chosen for c in program.report.kernels if c.module_path.endswith("lm_head")}
    assert ("turned" in heads) == small
    assert small or any(
        "than another op reads" in reason for reason in refusals(program.report, "linear", "turned")
    )


@pytest.mark.rotating
def test_memory_that_is_full_does_not_keep_experts_from_their_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atomc.compiler.weight_forms.MOST_COPIED", 0.0)
    with turning_experts():
        program = compile_model(random_model("qwen3_moe"), providers("turned"), owned=True)
    assert set(experts(program.report).values()) == {"turned"}


# Several programs over one model


def checkpoint(folder: Path, **differs: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"] | differs))
    return folder


def served(folder: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder),
        load_format="dummy",
        progress=False,
        max_num_seqs=2,
        max_model_len=32,
        **settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_a_program_for_embeddings_reads_the_weights_that_the_first_one_prepared(
    cached: bool, tmp_path: Path
) -> None:
    options = {**providers("turned"), "cache": cached, "cache_dir": str(tmp_path / "cache")}
    folder = checkpoint(tmp_path)
    plain = served(folder, options=providers()).engine.embed([[3, 1, 4], [1, 5]])
    prompts = [[3, 1, 4, 1], [5, 9]]
    told = SamplingParams(max_tokens=4, temperature=0)
    expected = [r.token_ids for r in served(folder, options=providers()).generate(prompts, told)]
    for _ in range(1 + cached):
        with turning_experts(), turning_linears():
            llm = served(folder, options=options)
            assert llm.program.replaced_bytes
            held = TrackedBytes().held()
            found = llm.engine.embed([[3, 1, 4], [1, 5]])
            assert TrackedBytes().held() - held < 2**16
            torch.testing.assert_close(torch.tensor(found), torch.tensor(plain))
            assert [r.token_ids for r in llm.generate(prompts, told)] == expected
            with pytest.raises(RuntimeError, match="load the checkpoint again"):
                llm.engine.module.state_dict()


@pytest.mark.rotating
def test_a_program_that_needs_an_original_which_was_freed_says_so() -> None:
    model = random_model("qwen3_moe")
    with turning_experts(), turning_linears():
        compile_model(model, providers("turned"), owned=True)
    with pytest.raises(RuntimeError, match="for which the original was freed"):
        compile_model(model, providers(), owned=True)


@pytest.mark.rotating
def test_weights_that_an_earlier_program_reads_are_kept_for_it() -> None:
    model = random_model("qwen3_moe")
    first = compile_model(model, providers(), owned=True)
    expected = logits(first)
    with turning_experts(), turning_linears():
        second = compile_model(model, providers("turned"), owned=True)
    assert second.replaced_bytes == 0
    torch.testing.assert_close(logits(first), expected)


@pytest.mark.rotating
def test_what_was_freed_and_prepared_goes_with_the_model() -> None:
    model = random_model("qwen3_moe")
    with turning_experts():
        program = compile_model(model, providers("turned"), owned=True)
    known = len(weights._table)
    before = TrackedBytes().held()
    del model, program
    assert TrackedBytes().held() < before and len(weights._table) < known


# A transformers class


def test_a_stock_class_is_checked_before_its_weights_are_freed(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "olmo2",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with turning_linears():
        llm = LLM(
            str(tmp_path),
            options=providers("turned"),
            progress=False,
            max_num_seqs=2,
            max_model_len=48,
        )
    assert llm.program.replaced_bytes
    assert any("as Olmo2ForCausalLM's own forward" in note for note in llm.program.report.notes)
    with pytest.raises(RuntimeError, match="load the checkpoint again"):
        llm.engine.module.hf_model.save_pretrained(tmp_path / "saved")


# Under torch.compile


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 8, bias=False)
        self.w13 = nn.Parameter(torch.randn(8, 48, 32) / 6)
        self.w2 = nn.Parameter(torch.randn(8, 32, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = ops.topk_route(self.gate(x), k=2, renormalize=True)
        return ops.moe_experts(x, ids, weights, self.w13, self.w2)


def test_torch_compile_keeps_the_experts_of_the_module_and_makes_no_second_ones() -> None:
    layer, x = Layer().requires_grad_(False), torch.randn(9, 32)
    before = {name: (p.data_ptr(), p.clone()) for name, p in layer.named_parameters()}
    with turning_experts(), turning_linears():
        compiled = torch.compile(layer, backend="atom", options=providers("turned"))
        torch.testing.assert_close(compiled(x), layer(x))
    report = atomc.reports()[-1]
    assert set(experts(report).values()) == {"torch"}
    assert refusals(report, "moe_experts", "turned") == {
        "it needs `w13` in another layout, and experts are held once, as the owner of the module "
        "has them (a model that the runtime loads is held in the layout of its kernels)"
    }
    for name, parameter in layer.named_parameters():
        assert before[name][0] == parameter.data_ptr()
        assert torch.equal(before[name][1], parameter)
    assert not weights.location_of(layer.w13).prepared
    assert weights.location_of(layer.gate.weight).prepared  # a small dense weight may be copied


# Plans and loading


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [None, pytest.param("fp8", marks=pytest.mark.slow), "fp8_block"])
def test_a_plan_counts_experts_in_aiters_layout_once(scheme: str | None, tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path,
        hidden_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=1,
        dtype="bfloat16",
    )
    model = build_model(folder, quantization=scheme, platform=Platform.named("gfx950"))
    program = compile_for(model, Platform.named("gfx950"))
    of_experts = {c.chosen for c in program.report.kernels if c.op.startswith("moe_experts")}
    assert of_experts == {"aiter"} and program.prepared_bytes
    memory = plan_step(model, Platform.named("gfx950"), Workload(1, 1, 16), program=program).memory
    assert memory.copies == 0
    parameters = sum(p.nbytes for p in model.module.parameters())
    assert parameters <= memory.weights < parameters + 100  # and buffers


@pytest.mark.parametrize("scheme", ["int4", pytest.param("mxfp4_a16", marks=pytest.mark.slow)])
def test_the_runtime_holds_experts_of_4_bits_in_the_order_of_fragments_and_nothing_else(
    scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    folder = checkpoint(tmp_path, hidden_size=128, num_hidden_layers=1, dtype="bfloat16")
    h200 = Platform.named("h200")
    model = build_model(folder, quantization=scheme, platform=h200)
    program = compile_for(model, h200)
    assert program.prepared_bytes
    assert plan_step(model, h200, Workload(1, 1, 16), program=program).memory.copies == 0


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [pytest.param("int4", marks=pytest.mark.slow), "mxfp4_a16"])
def test_experts_of_4_bits_of_a_users_module_stay_as_they_are_stored(
    scheme: str, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    folder = checkpoint(tmp_path, hidden_size=128, num_hidden_layers=1, dtype="bfloat16")
    h200 = Platform.named("h200")
    model = build_model(folder, quantization=scheme, platform=h200)
    program = compile_model(model.module, EAGER, platform=h200)
    # Of attention's layers there is a copy, in whole parts of 128 columns.
    weights = model.module.state_dict().items()
    layers = sum(weight.nbytes for name, weight in weights if "self_attn" in name)
    assert 0 < program.prepared_bytes < 1.5 * layers
    (choice, *_) = [c for c in program.report.kernels if c.op.startswith("moe_experts")]
    assert choice.chosen == "triton"
    assert "experts are held once" in dict(choice.refused)["triton"]


SCHEMES = ["fp8", "fp8_block", "int8", "int4", "mxfp4_a16"]


@pytest.mark.rotating
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(each, marks=() if each == "int8" else pytest.mark.slow) for each in SCHEMES],
)
def test_quantizing_while_loading_holds_one_layer_in_16_bits(scheme: str, tmp_path: Path) -> None:
    folder = checkpoint(
        tmp_path,
        hidden_size=256,
        moe_intermediate_size=256,
        num_experts=16,
        num_hidden_layers=4,
        dtype="bfloat16",
    )
    tracked = TrackedBytes()
    with tracked:
        model = loader.load(folder, load_format="dummy", quantization=scheme, progress=False)
    stored = sum(p.nbytes for p in model.parameters())
    layer = 16 * 3 * 256 * 256 * 2
    assert tracked.peak - tracked.before < stored + 1.3 * layer < 0.9 * 4 * layer
    gc.collect()
    assert abs(tracked.held() - tracked.before - stored) < 2**16


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_the_memory_that_dummy_weights_need_is_counted_as_they_are_stored(
    scheme: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path, num_hidden_layers=4, dtype="bfloat16")
    found: list[int] = []

    def counted(*given: Any) -> int:
        found.append(stored_bytes(*given))
        return found[-1]

    monkeypatch.setattr(dummy_weights, "stored_bytes", counted)
    model = loader.load(folder, load_format="dummy", quantization=scheme, progress=False)
    [expected] = found
    # Layers of one input may share a scale.
    assert 0 <= expected - sum(p.nbytes for p in model.parameters()) < 100


@pytest.mark.rotating
def test_an_audited_program_keeps_the_originals_that_the_audit_reads() -> None:
    expected = random_model("qwen3_moe")(IDS, POSITIONS)
    with turning_experts(), turning_linears():
        options = {**providers("turned"), "audit": True}
        program = compile_model(random_model("qwen3_moe"), options, owned=True)
        torch.testing.assert_close(logits(program), expected)
    assert program.replaced_bytes == 0 < program.prepared_bytes
    assert program.report.audit
