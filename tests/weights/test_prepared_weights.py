"""Copies of weights that kernels keep in a layout of their own: shared, followed, counted, and
never stale.
"""

import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal_text
from torch import Tensor, nn

import atomc
from atomc import kernels, ops
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.ops.op import Prepared
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.weights import registry as weights
from atomc.weights.parameters import fill_randomly

pytestmark = pytest.mark.skipif(
    kernels.load("onednn") is not None, reason=str(kernels.load("onednn"))
)
FP32, BF16 = [kernel for kernel in ops.linear.kernels if kernel.provider == "onednn"] or (
    None,
    None,
)
HERE = Platform.detect("cpu")
EAGER = {"glue": "eager", "providers": ("onednn", "torch")}


class Gated(nn.Module):
    """Two linears that are packed, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def model() -> Gated:
    torch.manual_seed(0)
    return Gated().eval().requires_grad_(False)


def held() -> set[weights.PreparedWeight]:
    """All that kernels have made of parameters that are alive."""
    gc.collect()
    return {
        made for location in list(weights._table.values()) for made in location.prepared.values()
    }


def chosen() -> list[str]:
    return [choice.chosen for choice in atomc.reports()[-1].kernels if choice.op == "linear"]


X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def test_a_weight_that_the_graph_writes_is_not_prepared() -> None:
    class Decayed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.mul_(0.9)
            return super().forward(x)

    theirs, ours = (Decayed(32, 48).requires_grad_(False) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    compiled = torch.compile(ours, backend="atom", options=EAGER)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), theirs(X))
    [choice] = atomc.reports()[-1].kernels
    reason = "it keeps a copy of `weight`: the graph writes it in each call"
    assert ("onednn", reason) in choice.refused


def write_in_place(module: Gated) -> None:
    module.gate.weight.mul_(2)
    module.down.weight[3] = 7


def write_in_inference_mode(module: Gated) -> None:
    with torch.inference_mode():
        module.up.weight.zero_()


def write_through_data(module: Gated) -> None:
    module.up.weight.data += torch.randn(48, 32)
    module.down.weight.data.mul_(-3)


def replace_data(module: Gated) -> None:
    module.gate.weight.data = torch.randn(48, 32)
    module.down.weight.data = torch.randn(32, 48)


def load_others(module: Gated) -> None:
    torch.manual_seed(1)
    module.load_state_dict(Gated().state_dict())


def assign_others(module: Gated) -> None:
    torch.manual_seed(1)
    module.load_state_dict(Gated().state_dict(), assign=True)


def step_of_an_optimizer(module: Gated) -> None:
    with torch.enable_grad():
        module.requires_grad_(True)
        module(X).square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=0.5).step()
        module.zero_grad()
        module.requires_grad_(False)


CHANGES = [
    write_in_place,
    write_in_inference_mode,
    write_through_data,
    replace_data,
    load_others,
    assign_others,
    step_of_an_optimizer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@torch.no_grad()
def test_a_copy_follows_every_change_of_its_weight(change) -> None:
    module = model()
    compiled = torch.compile(module, backend="atom", options=EAGER)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), module(X))
    assert chosen() == ["onednn"] * 2
    before = module(X)
    change(module)
    assert not torch.allclose(before, module(X), atol=1e-3)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), module(X), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_change_is_said_in_the_report() -> None:
    module = model()
    compiled = torch.compile(module, backend="atom", options=EAGER)
    compiled(X)
    report = atomc.reports()[-1]
    note = "weights changed after compiling, so kernels prepared them again"
    assert note not in report.notes
    write_in_place(module)
    compiled(X)
    assert report.notes.count(note) == 1


@torch.no_grad()
def test_the_report_says_how_much_memory_copies_take() -> None:
    torch.compile(model(), backend="atom", options=EAGER)(torch.cat([X] * 300))
    size = (2 * 48 * 32 + 32 * 48) * 4 / 2**20
    assert (
        f"2 prepared weights take {size:.1f} MiB in addition to the originals"
        in atomc.reports()[-1].notes
    )


@pytest.mark.rotating
@torch.no_grad()
def test_graphs_over_the_same_weights_share_their_copies_and_free_them_with_the_weights() -> None:
    known = held()
    module = model()
    compiled = torch.compile(module, backend="atom", options=EAGER, dynamic=False)
    for rows in (4, 5):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(
        torch.compile(module, backend="atom", options=EAGER, dynamic=True)(X), module(X)
    )
    assert len(held() - known) == 2
    del module, compiled
    torch._dynamo.reset()
    assert held() <= known


@torch.no_grad()
def test_one_graph_for_several_layers_keeps_a_copy_for_each() -> None:
    layers = [model(), model(), model()]
    for i, layer in enumerate(layers):
        layer.down.weight.mul_(i + 1)
    forward = torch.compile(Gated.forward, backend="atom", options=EAGER)
    made = []
    for _ in range(3):
        for layer in layers:
            torch.testing.assert_close(forward(layer, X), layer(X))
        made.append(
            [list(weights.location_of(layer.down.weight).prepared.values()) for layer in layers]
        )
    assert [len(one) for one in made[0]] == [1, 1, 1] and len({id(one) for (one,) in made[0]}) == 3
    assert all(one == other for one, other in pairwise(made))


@pytest.mark.parametrize("written", ["weight", "bias"])
@torch.no_grad()
def test_a_copy_that_is_made_of_two_weights_follows_both(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(weight: Tensor, bias: Tensor | None) -> Prepared:
        return Prepared(
            (
                torch.cat(
                    (weight, (weight.new_zeros(len(weight)) if bias is None else bias)[:, None]), 1
                ),
            )
        )

    def linear(x: Tensor, weight: tuple[Tensor], bias: Tensor | None = None) -> Tensor:
        return F.linear(F.pad(x, (0, 1), value=1.0), weight[0])

    monkeypatch.setitem(vars(ops.linear), "kernels", list(ops.linear.kernels))
    ops.linear.kernel("mine", prepare={("weight", "bias"): joined})(linear)
    module = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 5, bias=False)).requires_grad_(False)
    compiled = torch.compile(
        module, backend="atom", options={"glue": "eager", "providers": ("mine", "torch")}
    )
    torch.testing.assert_close(compiled(X), module(X))
    assert chosen() == ["mine", "mine"]
    getattr(module[0], written).mul_(3)
    torch.testing.assert_close(compiled(X), module(X))


def test_no_copy_is_kept_of_what_is_no_parameter_or_was_made_in_inference_mode() -> None:
    def multiplied(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w)

    w = torch.randn(8, 32)
    torch.testing.assert_close(
        torch.compile(multiplied, backend="atom", options=EAGER)(X, w), multiplied(X, w)
    )
    assert "it is not a parameter, and may be a different tensor at each call" in str(
        atomc.reports()[-1].kernels
    )
    with torch.inference_mode():
        module = nn.Linear(32, 8).requires_grad_(False)
        torch.testing.assert_close(
            torch.compile(module, backend="atom", options=EAGER)(X), module(X)
        )
    assert "it was created in inference mode, where torch does not count writes" in str(
        atomc.reports()[-1].kernels
    )


def test_compiled_code_that_reads_copies_is_not_loaded_for_weights_that_have_none(
    tmp_path: Path,
) -> None:
    def outcome(module: nn.Module) -> tuple[str | None, list[str]]:
        torch._dynamo.reset()
        with torch.inference_mode():
            options = {**EAGER, "cache": True, "cache_dir": str(tmp_path)}
            torch.testing.assert_close(
                torch.compile(module, backend="atom", options=options)(X), module(X)
            )
        return atomc.reports()[-1].cache, chosen()

    with torch.inference_mode():
        inside = nn.Linear(32, 8).requires_grad_(False)
    outside = nn.Linear(32, 8).requires_grad_(False)
    assert outcome(outside)[1] == ["onednn"]
    assert outcome(outside) == ("hit", ["onednn"])
    cache, kernels_of_inside = outcome(inside)
    assert "no copy: it was created in inference mode" in str(cache) and kernels_of_inside == [
        "torch"
    ]


def test_copies_take_no_more_than_a_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "atomc.compiler.weight_forms.MOST_COPIED", 2.5 * 48 * 32 * 4 / HERE.memory
    )  # the pack fits, not both
    module = model()
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(module, backend="atom", options=EAGER)(X), module(X)
        )
    assert chosen() == ["onednn", "torch"]
    assert "of this machine's memory" in str(atomc.reports()[-1].kernels)


@torch.no_grad()
def test_copies_for_other_numbers_of_rows_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def transposed(weight: Tensor) -> Prepared:
        return Prepared((weight.t().contiguous(),))

    def linear(x: Tensor, weight: tuple[Tensor], bias: Tensor | None = None) -> Tensor:
        return x @ weight[0] + (0 if bias is None else bias)

    monkeypatch.setattr("atomc.compiler.weight_forms.MOST_COPIED", 1.5 * 48 * 32 * 4 / HERE.memory)
    monkeypatch.setitem(vars(ops.linear), "kernels", list(ops.linear.kernels))
    ops.linear.kernel("mine", prepare={"weight": transposed}, tokens=ops.Tokens(1, 8))(linear)
    module = nn.Linear(32, 48).requires_grad_(False)
    options = {"glue": "eager", "providers": ("mine", "onednn", "torch")}
    torch.testing.assert_close(
        torch.compile(module, backend="atom", options=options, dynamic=True)(X), module(X)
    )
    assert chosen() == ["mine", "torch"]


@pytest.mark.parametrize("glue", ["eager", "inductor"])
@torch.no_grad()
def test_one_row_and_many_are_right_at_the_border_of_the_ranges(glue: str) -> None:
    module = model()
    compiled = torch.compile(module, backend="atom", options={**EAGER, "glue": glue}, dynamic=True)
    for rows in (2, 1, 3, 8, 65):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def test_a_program_takes_new_copies_when_it_is_asked_to_check() -> None:
    made = create_model(QWEN3, dtype=torch.float32)
    fill_randomly(made, "cpu")
    program = compile_model(ready(made), EAGER)
    assert {(c.tokens, c.chosen) for c in program.report.kernels if c.op == "linear"} == {
        ("1", "torch"),
        ("2 and more", "onednn"),
    }
    assert any("prepared weights take" in note for note in program.report.notes)
    program.bind([spec.allocate(1, 16, "cpu") for spec in program.specs])
    group = ops.GroupStep(torch.arange(5), torch.zeros(1, 1, dtype=torch.int32))
    step = ops.Step(
        torch.arange(5),
        torch.arange(5),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.tensor([5], dtype=torch.int32),
        torch.arange(5),
        (group,),
        torch.zeros(1, dtype=torch.int64),
    )
    with torch.no_grad():
        torch.testing.assert_close(program(step), made(step.input_ids, step.positions))
        made.model.layers[0].mlp.down_proj.weight.mul_(30)
        program.check()
        torch.testing.assert_close(
            program(step), made(step.input_ids, step.positions), rtol=1e-4, atol=1e-5
        )


REFUSALS = [
    (FP32, "sm90", {}, "oneDNN kernels run on a CPU"),
    (FP32, "cpu-neoverse-v2", {}, "measured on x86 CPUs only, this is aarch64"),
    (
        FP32,
        "cpu-zen4",
        {"x": torch.bfloat16, "weight": torch.bfloat16},
        "arguments are torch.bfloat16: written for torch.float32",
    ),
    (FP32, "cpu-cascadelake", {}, None),
    (
        BF16,
        "cpu-cascadelake",
        {"x": torch.bfloat16, "weight": torch.bfloat16},
        "in bf16 it is not faster on a CPU without avx512_bf16",
    ),
    (BF16, "cpu-zen4", {"x": torch.bfloat16, "weight": torch.bfloat16}, None),
    (
        BF16,
        "cpu-zen4",
        {"x": torch.bfloat16},
        "arguments are torch.bfloat16, torch.float32: written for torch.bfloat16",
    ),
]


@pytest.mark.parametrize(("kernel", "platform", "dtypes", "reason"), REFUSALS)
def test_onednn_serves_fp32_and_where_the_cpu_multiplies_it_bf16(
    kernel, platform, dtypes, reason
) -> None:
    given = {
        name: torch.zeros(8, 8, dtype=dtypes.get(name, torch.float32)) for name in ("x", "weight")
    }
    assert refusal_text(kernel, Platform.named(platform), given) == reason


def test_a_strided_weight_is_refused() -> None:
    given = {"x": torch.zeros(2, 8), "weight": torch.zeros(8, 16)[:, ::2]}
    assert refusal_text(FP32, Platform.named("cpu-zen4"), given) == "the weight is not contiguous"
