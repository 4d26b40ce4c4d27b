"""The modular kernel of mixtures of experts: every pair of parts computes what the op means, or says
why the pair does not exist; docs/moe.md has the table of parts.

Run as a program, it writes that table: PYTHONPATH=.:tests/_support .venv/bin/python tests/kernels/moe/test_moe_modular.py
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flashinfer_stand_in
import mori_stand_in
import pytest
import torch
from bench_script import loaded
from kernel_cases import experts as cases
from kernel_cases.draw import Draw
from kernel_cases.rows import one_process_group
from memory import PoisonedMemory
from torch import Tensor

from atomc.kernels.moe import (
    SCHEMES,
    ActivationFormat,
    AllToAll,
    BatchedAllToAll,
    BatchedReference,
    Dispatched,
    ExpertsConfig,
    ExpertsKernel,
    ExpertWeights,
    FlashInfer,
    Fp8PerBlock,
    Grouped,
    ModularExperts,
    NaiveBatched,
    NoEP,
    PrepareFinalize,
    Reference,
    Sizes,
    Triton,
    TritonBatched,
    WorkspaceShapes,
    weight_and_reduce,
)
from atomc.kernels.moe.combinations.batching import slots_of
from atomc.kernels.moe.combinations.reference import experts_reference
from atomc.kernels.moe.experts import Spaces
from atomc.ops.experts import moe_experts

PARTS = loaded("moe_parts")
EXPERTS, PREPARE, REFUSED = PARTS.EXPERTS, PARTS.PREPARE, PARTS.REFUSED
names, why_not = PARTS.names, PARTS.why_not
PAGE = Path(__file__).parents[3] / "docs/moe.md"
START, END = "<!-- parts: start -->\n", "<!-- parts: end -->\n"
STANDARD, BATCHED = ActivationFormat.STANDARD, ActivationFormat.BATCHED
Make = Callable[..., dict[str, Any]]
MAKE: dict[str, Make] = {
    "none": cases.full,
    "fp8": cases.fp8,
    "fp8_block": cases.fp8_block,
    "int8": cases.int8,
}
SIZES: dict[str, dict[str, Any]] = {
    "usual": {},
    "one token": {"tokens": 1},
    "no tokens": {"tokens": 0},
    "one expert": {"experts": 1, "k": 1},
    "odd sizes": {"tokens": 7, "hidden": 96, "inner": 32, "experts": 5, "k": 3},
    "blocks that end early": {"tokens": 3, "hidden": 160, "inner": 96},
    "more tokens than a tile": {"tokens": 35, "experts": 3},
    "more experts than tokens": {"tokens": 3, "experts": 40, "k": 4},
    "GPT-OSS": {"bias": True, "rounded": True, **cases.OAI},
    "gelu": {"activation": "gelu", "bias": True},
    "gelu by tanh": {"activation": "gelu_tanh", "limit": 1.0},
}
# Of the error, relative to the size of results. A quantizer rounds another sum to another code.
TOLERANCE = {
    ("none", torch.float32): 2e-6,
    ("none", torch.bfloat16): 1e-2,
    ("quantized", torch.float32): 1e-2,
    ("quantized", torch.bfloat16): 4e-2,
}
ALL_PAIRS = [
    (prepare, experts, scheme)
    for prepare in names("prepare")
    for experts in names("experts")
    for scheme in SCHEMES
]
LEGAL = [pair for pair in ALL_PAIRS if why_not(*pair) is None]
ILLEGAL = [pair for pair in ALL_PAIRS if why_not(*pair) is not None]


@pytest.fixture(autouse=True, scope="module")
def a_process_group() -> None:
    one_process_group()


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer_stand_in.install(monkeypatch)
    mori_stand_in.install(monkeypatch)


class Call:
    """Arguments of one call of the modular kernel, and what the op computes of them."""

    def __init__(self, scheme: str, dtype: torch.dtype, make: Make | None = None, **given: Any):
        made = (make or MAKE[scheme])(Draw(dtype), **given)
        block = made.pop("block", 128)
        self.scheme, self.dtype = scheme, dtype
        self.x, self.x_scale = made.pop("x"), made.pop("x_scale", None)
        self.ids, self.weights = made.pop("ids"), made.pop("weights")
        self.out_dtype = made.pop("out_dtype", None)
        made.pop("act_scale", None)
        stored = {name: made.pop(name) for name in [*made] if name in ExpertWeights.__annotations__}
        self.of_experts = ExpertWeights(**stored)
        chosen = Fp8PerBlock(block=block) if scheme == "fp8_block" else SCHEMES[scheme]
        self.config = ExpertsConfig(chosen, **made)

    @property
    def num_experts(self) -> int:
        return self.of_experts.num_experts

    def run(self, prepare: PrepareFinalize, experts: ExpertsKernel, **rest: Any) -> Tensor:
        """With everything that nobody wrote poisoned."""
        with PoisonedMemory():
            moe = ModularExperts(prepare, experts, self.config, **rest)
            return moe(
                self.x,
                self.ids,
                self.weights,
                moe.prepare_weights(self.of_experts),
                x_scale=self.x_scale,
                out_dtype=self.out_dtype,
            )

    def reference(self) -> Tensor:
        return experts_reference(
            self.x,
            self.x_scale,
            self.ids,
            self.weights,
            self.of_experts,
            self.config,
            self.out_dtype or self.dtype,
        )

    def with_experts(self, rows: Tensor) -> ExpertWeights:
        """The weights of some experts."""
        kept = {
            name: None if value is None else value[rows]
            for name, value in vars(self.of_experts).items()
        }
        return ExpertWeights(**kept)

    def assert_near(self, actual: Tensor, reference: Tensor) -> None:
        assert (actual.shape, actual.dtype) == (reference.shape, reference.dtype)
        if not reference.numel():
            return
        kind = "none" if self.scheme == "none" else "quantized"
        size = reference.float().square().mean().sqrt()
        error = (actual.float() - reference.float()).square().mean().sqrt()
        assert error <= TOLERANCE[kind, self.dtype] * size, f"error {error:.3g} of {size:.3g}"


def prepared(name: str, expert_map: Tensor | None, call: Call) -> PrepareFinalize:
    """A part of the table, with some more room than the tokens need."""
    if expert_map is None and not PREPARE[name].alone:
        expert_map = torch.arange(call.num_experts, dtype=torch.int32)
    return PREPARE[name].make(expert_map, len(call.x) + 2)


def sized() -> Iterator[Any]:
    """Legal pairs and sizes. Interpreted kernels get all sizes behind the parts without
    communication; behind the others most of them are slow, which send what is computed the same.
    """
    for pair in LEGAL:
        interpreted = "triton" in pair[1] and not PREPARE[pair[0]].alone
        for size in SIZES:
            if pair[1] == "flashinfer" and "gelu" in size:
                continue  # refused below
            later = interpreted and size not in ("usual", "no tokens", "odd sizes")
            yield pytest.param(*pair, size, marks=[pytest.mark.slow] if later else [])


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize(("prepare", "experts", "scheme", "size"), list(sized()))
def test_a_legal_pair_computes_what_the_op_means(
    prepare: str, experts: str, scheme: str, size: str
) -> None:
    # Each size in one of the dtypes, and each pair in both.
    dtype = (torch.float32, torch.bfloat16)[[*SIZES].index(size) % 2]
    call = Call(scheme, dtype, **SIZES[size])
    part = prepared(prepare, None, call)
    call.assert_near(call.run(part, EXPERTS[experts].part()), call.reference())


@pytest.mark.parametrize(("prepare", "experts", "scheme"), LEGAL)
def test_a_legal_pair_skips_ids_of_no_expert_and_adds_an_expert_that_is_chosen_twice(
    prepare: str, experts: str, scheme: str
) -> None:
    call = Call(scheme, torch.float32, partial(cases.outside, MAKE[scheme]))
    call.ids[1] = call.ids[1, 0]
    part = prepared(prepare, None, call)
    call.assert_near(call.run(part, EXPERTS[experts].part()), call.reference())


@pytest.mark.parametrize(("prepare", "experts", "scheme"), LEGAL)
def test_a_legal_pair_finds_experts_by_the_expert_map(
    prepare: str, experts: str, scheme: str
) -> None:
    call = Call(scheme, torch.float32, bias=True)
    reference = call.reference()
    expert_map = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32)
    part = prepared(prepare, expert_map, call)
    call.of_experts = call.with_experts(expert_map.argsort())
    call.assert_near(call.run(part, EXPERTS[experts].part()), reference)


@pytest.mark.parametrize(
    ("prepare", "experts", "scheme"), [pair for pair in LEGAL if PREPARE[pair[0]].alone]
)
def test_with_a_map_of_some_experts_the_result_is_what_they_add(
    prepare: str, experts: str, scheme: str
) -> None:
    call = Call(scheme, torch.float32, bias=True)
    expert_map = torch.tensor([-1, 1, -1, 2, 0, -1], dtype=torch.int32)
    elsewhere = (expert_map < 0)[call.ids.long()]
    there = replace_ids(call, call.ids.masked_fill(elsewhere, -1)).reference()
    part = prepared(prepare, expert_map, call)
    call.of_experts = call.with_experts(torch.tensor([4, 1, 3]))
    call.assert_near(call.run(part, EXPERTS[experts].part()), there)


def replace_ids(call: Call, ids: Tensor) -> Call:
    other = Call.__new__(Call)
    vars(other).update(vars(call) | {"ids": ids})
    return other


@pytest.mark.parametrize(
    ("prepare", "experts", "scheme", "chunk_rows"),
    [
        (*pair, 3)
        for pair in LEGAL
        if EXPERTS[pair[1]].part.supports_chunking and (pair[0] == "no_ep" or pair[1] != "triton")
    ]
    + [("no_ep", name, "none", rows) for name in ("reference", "grouped") for rows in (1, 7, 100)],
)
def test_chunks_give_the_result_of_all_rows(
    prepare: str, experts: str, scheme: str, chunk_rows: int
) -> None:
    call = Call(scheme, torch.float32, tokens=7, bias=True)
    part = prepared(prepare, None, call)
    chunks = call.run(part, EXPERTS[experts].part(), chunk_rows=chunk_rows)
    call.assert_near(chunks, call.reference())


@pytest.mark.parametrize(
    ("prepare", "scheme"),
    [
        (name, scheme)
        for name, made in PREPARE.items()
        for scheme in made.part.schemes
        if scheme != "none"
    ],
)
def test_prepare_quantizes_an_x_without_scales(prepare: str, scheme: str) -> None:
    call = Call(scheme, torch.bfloat16)
    codes, scale = call.config.scheme.quantize(x := Draw(torch.bfloat16).normal(*call.x.shape))
    call.x, call.x_scale = codes, scale
    reference = call.reference()
    call.x, call.x_scale, call.out_dtype = x, None, None
    part = prepared(prepare, None, call)
    experts = Reference() if part.activation_format == STANDARD else NaiveBatched()
    call.assert_near(call.run(part, experts), reference)


@pytest.mark.parametrize(
    "experts", [Reference(), Grouped(), Triton(), FlashInfer(), NaiveBatched(), TritonBatched()]
)
def test_weights_of_any_strides_are_read_in_place(experts: ExpertsKernel) -> None:
    call = Call("none", torch.float32, cases.transposed)
    part = NoEP() if experts.activation_formats[0] == STANDARD else BatchedReference()
    call.assert_near(call.run(part, experts), call.reference())


@pytest.mark.parametrize("experts", [Reference(), NaiveBatched(), TritonBatched()])
def test_blocks_can_have_other_sizes(experts: ExpertsKernel) -> None:
    call = Call("fp8_block", torch.float32, block=64, hidden=160, inner=96)
    part = NoEP() if experts.activation_formats[0] == STANDARD else BatchedReference()
    call.assert_near(call.run(part, experts), call.reference())


@pytest.mark.parametrize("experts", [Reference(), Triton(), NaiveBatched(), TritonBatched()])
def test_a_weight_can_have_one_scale_per_expert(experts: ExpertsKernel) -> None:
    call = Call("fp8", torch.float32, per="expert")
    part = NoEP() if experts.activation_formats[0] == STANDARD else BatchedReference()
    call.assert_near(call.run(part, experts), call.reference())


def test_the_batched_kernel_leaves_unused_rows_alone() -> None:
    pytest.importorskip("triton")
    from atomc.kernels.moe.combinations.batched_triton import batched_product

    x, weight, out = torch.randn(3, 5, 32), torch.randn(3, 48, 32), torch.full((3, 5, 48), 7.0)
    batched_product(x, None, weight, None, None, torch.tensor([2, 0, 5]).int(), out)
    for expert, used in enumerate((2, 0, 5)):
        expected = x[expert, :used] @ weight[expert].T
        torch.testing.assert_close(out[expert, :used], expected, rtol=1e-5, atol=1e-5)
        assert (out[expert, used:] == 7).all()


@pytest.mark.parametrize("prepare", PREPARE)
def test_a_weight_can_multiply_the_input_of_the_only_expert(prepare: str) -> None:
    call = Call("none", torch.float32, weight_on_input=True, k=1)
    call.weights = torch.linspace(0.1, 2, len(call.x)).unsqueeze(1)
    w = call.of_experts
    reference = moe_experts.reference(
        call.x, call.ids, call.weights, w.w13, w.w2, weight_on_input=True
    )
    part = prepared(prepare, None, call)
    experts = Reference() if part.activation_format == STANDARD else NaiveBatched()
    call.assert_near(call.run(part, experts), reference)
    assert not torch.allclose(reference, call.reference())


@pytest.mark.parametrize(("prepare", "experts", "scheme"), ILLEGAL)
def test_an_illegal_pair_says_why(prepare: str, experts: str, scheme: str) -> None:
    reason = why_not(prepare, experts, scheme)
    assert reason is not None and len(reason.split()) > 3
    for name in (prepare, experts):
        if name in REFUSED:
            assert "not adapted: " in reason
            return
    part = prepared(prepare, None, Call("none", torch.float32))
    with pytest.raises(ValueError) as raised:
        ModularExperts(part, EXPERTS[experts].part(), ExpertsConfig(SCHEMES[scheme]))
    assert str(raised.value) == reason


@pytest.mark.parametrize(
    ("prepare", "experts", "scheme", "reason"),
    [
        (
            "no_ep",
            "naive_batched",
            "none",
            "no_ep returns activations in the standard format, and naive_batched takes the "
            "batched format",
        ),
        (
            "batched_reference",
            "grouped",
            "none",
            "batched_reference returns activations in the batched format, and grouped takes the "
            "standard format",
        ),
        ("no_ep", "grouped", "int8", "grouped supports the schemes none, not int8"),
        ("mori", "grouped", "int8", "mori supports the schemes none, fp8, fp8_block, not int8"),
        ("pplx", "grouped", "none", "pplx is not adapted: there is no package to install"),
    ],
)
def test_reasons_of_illegal_pairs(prepare: str, experts: str, scheme: str, reason: str) -> None:
    assert why_not(prepare, experts, scheme) == reason


def test_a_name_that_is_not_in_the_table_is_an_error_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="there is no experts part 'cutlass': choose from refer"):
        why_not("no_ep", "cutlass", "none")
    with pytest.raises(ValueError, match="scheme 'fp6' is not one of none, fp8"):
        why_not("no_ep", "reference", "fp6")


class Recording(ExpertsKernel):
    """Fills its output with the rows of its calls, and remembers where its workspaces were."""

    name = "recording"
    activation_formats = (STANDARD, STANDARD)
    schemes = ("none",)
    supports_chunking = True
    supports_expert_map = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def workspace_shapes(self, sizes: Sizes) -> WorkspaceShapes:
        return WorkspaceShapes((sizes.rows, 2, 5), (sizes.rows, 3), (sizes.rows, sizes.hidden))

    def apply(self, output: Tensor, spaces: Spaces, dispatched: Dispatched, *rest: Any) -> None:
        places = [(space.data_ptr(), tuple(space.shape)) for space in spaces]
        self.calls.append((dispatched.rows, *places))
        output.copy_(dispatched.x)

    def finalize_weight_and_reduce(self) -> weight_and_reduce.WeightAndReduce:
        return weight_and_reduce.NoOp()


def test_workspaces_are_allocated_once_and_reused_by_all_chunks() -> None:
    call, experts = Call("none", torch.float32, tokens=7), Recording()
    out = call.run(NoEP(), experts, chunk_rows=3)
    rows, first, second = zip(*experts.calls, strict=True)
    assert rows == (3, 3, 1)
    assert [shape for _, shape in first] == [(3, 2, 5), (3, 2, 5), (1, 2, 5)]
    assert [shape for _, shape in second] == [(3, 3), (3, 3), (1, 3)]
    assert len({address for address, _ in first}) == len({address for address, _ in second}) == 1
    assert torch.equal(out, call.x)


class Noted(NoEP):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def prepare_no_receive(self, *given: Any) -> Callable[[], Dispatched]:
        receive = super().prepare_no_receive(*given)
        self.events.append("sent")
        return lambda: (self.events.append("received"), receive())[1]


def test_shared_experts_run_between_send_and_receive_and_are_added() -> None:
    call, part = Call("none", torch.float32), Noted()
    alone = call.run(NoEP(), Reference())

    def shared() -> Tensor:
        part.events.append("shared")
        return call.x * 3

    moe = ModularExperts(part, Reference(), call.config)
    out = moe(call.x, call.ids, call.weights, call.of_experts, shared=shared)
    assert part.events == ["sent", "shared", "received"]
    assert torch.equal(out, alone + call.x * 3)


@pytest.mark.parametrize("part", [NaiveBatched, TritonBatched])
def test_chunks_of_a_part_that_needs_all_rows_are_refused(part: type[ExpertsKernel]) -> None:
    with pytest.raises(ValueError, match=r"processes all rows at once: chunk_rows=4 must be None"):
        ModularExperts(BatchedReference(), part(), chunk_rows=4)


@pytest.mark.parametrize(
    ("prepare", "experts", "multiple"),
    [(NoEP(), Triton(), 128), (BatchedReference(), TritonBatched(), 64)],
)
def test_blocks_that_the_tiles_of_a_kernel_cross_are_refused(
    prepare: PrepareFinalize, experts: ExpertsKernel, multiple: int
) -> None:
    reason = f"{experts.name} supports fp8 blocks of multiples of {multiple}, not of 48"
    with pytest.raises(ValueError, match=reason):
        ModularExperts(prepare, experts, ExpertsConfig(Fp8PerBlock(block=48)))


@pytest.mark.parametrize(
    "experts", [part for part in EXPERTS if EXPERTS[part].part.activation_formats[0] == BATCHED]
)
def test_an_unknown_activation_is_refused(experts: str) -> None:
    with pytest.raises(ValueError, match="activation of experts 'relu' is not one of"):
        ModularExperts(
            BatchedReference(), EXPERTS[experts].part(), ExpertsConfig(activation="relu")
        )


def test_chunks_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_rows=0 must be at least 1"):
        ModularExperts(NoEP(), Grouped(), chunk_rows=0)


def test_a_part_without_an_expert_map_is_refused_where_experts_are_missing() -> None:
    part = NoEP(torch.tensor([0, -1, 1, -1]))
    with pytest.raises(
        ValueError, match="recording has no expert map, and this rank has only 2 of 4"
    ):
        ModularExperts(part, Recording())


def test_ids_of_another_dtype_than_a_part_sends_are_refused() -> None:
    call = Call("none", torch.float32)
    call.ids = call.ids.long()
    with pytest.raises(ValueError, match=r"takes ids of torch.int32, not torch.int64"):
        call.run(AllToAll(torch.arange(6)), Grouped())


def test_ids_that_are_no_integers_are_refused() -> None:
    call = Call("none", torch.float32)
    call.ids = call.ids.float()
    with pytest.raises(ValueError, match=r"takes ids of torch.int32 or torch.int64, not torch.fl"):
        call.run(NoEP(), Grouped())


def test_more_tokens_than_a_batch_has_room_for_are_refused() -> None:
    call = Call("none", torch.float32)
    with pytest.raises(ValueError, match="5 tokens exceed the max_tokens_per_rank=4 of batched_re"):
        call.run(BatchedReference(max_tokens_per_rank=4), NaiveBatched())


def test_other_weights_than_the_expert_map_says_are_refused() -> None:
    call = Call("none", torch.float32)
    with pytest.raises(ValueError, match="gives this rank 2 experts, the weights have 6"):
        call.run(NoEP(torch.tensor([0, -1, 1, -1, -1, -1])), Grouped())


def test_weights_of_another_scheme_are_refused() -> None:
    call = Call("fp8", torch.float32)
    call.config = ExpertsConfig()
    with pytest.raises(ValueError, match="the scheme is none, and the weights have scales"):
        call.run(NoEP(), Grouped())
    call = Call("none", torch.float32)
    call.config = ExpertsConfig(SCHEMES["int8"])
    with pytest.raises(ValueError, match="the scheme is int8, and the weights have no scales"):
        call.run(NoEP(), Reference())


def test_codes_without_an_out_dtype_are_refused() -> None:
    call = Call("fp8", torch.float32)
    call.out_dtype = None
    with pytest.raises(ValueError, match="it needs out_dtype and a scheme other than none"):
        call.run(NoEP(), Reference())


def test_weights_on_the_input_of_several_experts_are_refused() -> None:
    call = Call("none", torch.float32)
    call.config = replace(call.config, weight_on_input=True)
    with pytest.raises(ValueError, match=r"of its only expert .* here are 2 experts per token"):
        call.run(NoEP(), Grouped())


def test_a_part_that_sends_needs_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for part in (AllToAll, partial(BatchedAllToAll, max_tokens_per_rank=4)):
        with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group first"):
            part(torch.arange(4))


def test_an_expert_that_no_rank_has_is_refused() -> None:
    with pytest.raises(ValueError, match="all_to_all: expert 1 is on 0 ranks by their expert maps"):
        AllToAll(torch.tensor([0, -1, 1]))


def test_triton_on_a_cpu_without_its_interpreter_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="triton_batched cannot run here: Triton kernels run on a"):
        Call("none", torch.float32).run(BatchedReference(), TritonBatched())


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("target", "kernels"), [("sm90", 13), pytest.param("gfx942", 9, marks=pytest.mark.slow)]
)
def test_the_batched_kernel_compiles_for_gpus_that_are_not_here(
    target: str, kernels: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parents[2] / "_support/compile_batched_triton.py"
    done = subprocess.run(
        [sys.executable, script, target], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["_product compiled"] * kernels


def test_results_that_finalize_has_to_weight_are_never_weighted_by_delegate() -> None:
    with pytest.raises(RuntimeError, match="finalize replaces it"):
        weight_and_reduce.Delegate().apply(torch.ones(1, 1, 1), torch.ones(1, 1))


def test_slots_are_the_tokens_of_an_expert_in_their_order() -> None:
    ids = torch.tensor([[2, 0], [2, 2], [-1, 2], [0, 1]])
    slots, counts = slots_of(ids, 3, 5)
    assert slots.tolist() == [[10, 0], [11, 11], [-1, 12], [1, 5]]
    assert counts.tolist() == [2, 1, 3]


def test_the_batch_has_room_for_all_dispatchers() -> None:
    part = BatchedAllToAll(torch.arange(6, dtype=torch.int32), max_tokens_per_rank=9)
    call = Call("none", torch.float32)
    dispatched = part.prepare(
        call.x, None, call.ids, call.weights, call.num_experts, call.config.scheme
    )
    rows = part.num_dispatchers * part.max_tokens_per_rank
    assert dispatched.x.shape == (call.num_experts, rows, call.x.shape[1])
    assert dispatched.expert_num_tokens is not None
    assert dispatched.expert_num_tokens.sum() == call.ids.numel()


def between(text: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, rest = text.split(START)
    inside, after = rest.split(END)
    return before, inside, after


def rows() -> Iterator[str]:
    yield "| part | kind | format | schemes | here | what it is, or why it is not here |"
    yield "|---|---|---|---|---|---|"
    for prepare in PREPARE.values():
        yield row(prepare.part, "prepare", prepare.part.activation_format, prepare.note)
    for experts in EXPERTS.values():
        yield row(experts.part, "experts", experts.part.activation_formats[0], experts.note)
    for refused in sorted(REFUSED.values(), key=lambda refused: refused.kind, reverse=True):
        formats = ", ".join(item.value for item in refused.formats)
        yield f"| `{refused.name}` | {refused.kind} | {formats} | - | no | {refused.reason} |"


def row(
    part: type[PrepareFinalize] | type[ExpertsKernel], kind: str, form: ActivationFormat, note: str
) -> str:
    return f"| `{part.name}` | {kind} | {form.value} | {', '.join(part.schemes)} | yes | {note} |"


def table() -> str:
    return "\n" + "\n".join(rows()) + "\n\n"


def test_the_page_has_the_table_of_parts() -> None:
    assert between(PAGE.read_text())[1] == table()


if __name__ == "__main__":
    before, _, after = between(PAGE.read_text())
    PAGE.write_text(before + START + table() + END + after)
