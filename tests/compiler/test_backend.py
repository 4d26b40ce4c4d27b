"""What torch.compile(model, backend="atom") promises to its caller."""

import gc
import logging
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shared_objects import shown
from torch import Tensor, nn

import atomc
from atomc import ops
from atomc.compiler.pipeline import register_pass
from atomc.rewriting.graph_pass import Context, Pass
from atomc.rewriting.rewrite import Fired

EAGER = {"glue": "eager"}


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.to(torch.float32)
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(
            x.dtype
        )


class Block(nn.Module):
    """A norm, a gated MLP and a residual add: enough to recognise something."""

    def __init__(self, width: int = 32, eps: float = 1e-6):
        super().__init__()
        self.norm = Norm(width, eps)
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().eval().requires_grad_(False)


def last() -> atomc.Report:
    return atomc.reports()[-1]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.rotating
def test_the_backend_is_found_by_name_in_a_program_that_never_imports_atomc() -> None:
    code = (
        "import torch; m = torch.nn.Linear(4, 4).requires_grad_(False); x = torch.randn(3, 4)\n"
        "c = torch.compile(m, backend='atom', options={'glue': 'eager', 'strict': True})\n"
        "torch.testing.assert_close(c(x), m(x)); print('same')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "same", done.stderr


@pytest.mark.parametrize("glue", ["eager", "inductor"])
def test_a_compiled_block_equals_eager_and_the_report_says_what_fired(
    block: Block, glue: str
) -> None:
    x = torch.randn(5, 32)
    assert_close(torch.compile(block, backend="atom", options={"glue": glue})(x), block(x))
    report = last()
    assert report.treated and report.model == "Block"
    assert report.matches["rms_norm"] == report.matches["silu_and_mul"] == 1
    assert {choice.op: choice.chosen for choice in report.kernels}["silu_and_mul"] == {
        "eager": "torch",
        "inductor": "inline",
    }[glue]


def test_a_module_without_anything_to_recognise_equals_eager() -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5)
    ).eval()
    x = torch.randn(2, 3, 8)
    with torch.inference_mode():
        assert_close(torch.compile(model, backend="atom", options=EAGER)(x), model(x))
    assert last().treated


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"glu": "eager"}, r"unknown option 'glu' \(did you mean 'glue'\?\); options are"),
        ({"glue": "eger"}, r"glue='eger': expected one of auto, inductor, eager"),
        ({"rounding": 1}, "rounding=1: expected one of"),
        ({"strict": "yes"}, "strict='yes': expected True or False"),
        ({"passes": ["rms_norm"]}, "expected a dict"),
        (
            {"passes": {"rms_nrm": False}},
            r"no pass 'rms_nrm' \(did you mean 'rms_norm'\?\); passes are",
        ),
        ({"passes": {"rms_norm": 0}}, "expected True or False for each pass"),
        (
            {"passes": {"rms_norm": False, "add_rms_norm": True}},
            "'add_rms_norm' cannot take effect, it needs 'rms_norm'",
        ),
        (
            {"passes": {"rope_kv_write": True}},
            "'rope_kv_write' cannot take effect outside the runtime",
        ),
        ({"providers": "torch"}, "expected a list of provider names"),
        (
            {"providers": ["tritn"]},
            r"no provider 'tritn' \(did you mean 'triton'\?\); providers are",
        ),
        ({"inductor": {"no_such_key": 1}}, "Inductor has no option 'no_such_key'"),
        ({"dump": 3}, "dump=3: expected the name of a folder"),
        ({"batch_invariant": 1}, "batch_invariant=1: expected True or False"),
    ],
)
def test_a_wrong_option_is_one_clear_error_and_is_not_wrapped(
    block: Block, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(atomc.OptionsError, match=says) as caught:
        torch.compile(block, backend="atom", options={"strict": False, **options})(
            torch.randn(5, 32)
        )
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "mode",
    [
        "default",
        "reduce-overhead",
        pytest.param("max-autotune", marks=pytest.mark.slow),
        "max-autotune-no-cudagraphs",
    ],
)
def test_the_modes_of_torch_compile_are_accepted(block: Block, mode: str) -> None:
    x = torch.randn(5, 32)
    assert_close(torch.compile(block, backend="atom", mode=mode)(x), block(x))


def test_another_mode_is_an_error_that_lists_the_modes(block: Block) -> None:
    from atomc.backend import atom

    with pytest.raises(atomc.OptionsError, match=r"mode='fast': expected one of .*reduce-overhead"):
        atom(torch.fx.symbolic_trace(nn.Linear(2, 2)), [], mode="fast")


def test_options_for_inductor_are_handed_on(block: Block) -> None:
    x = torch.randn(5, 32)
    compiled = torch.compile(
        block, backend="atom", options={"glue": "inductor", "inductor": {"max_autotune": False}}
    )
    assert_close(compiled(x), block(x))


def test_no_global_setting_of_dynamo_or_inductor_changes(block: Block) -> None:
    before = torch._dynamo.config.save_config(), torch._inductor.config.save_config()
    torch.compile(block, backend="atom", dynamic=True, options={"glue": "inductor"})(
        torch.randn(5, 32)
    )
    assert (torch._dynamo.config.save_config(), torch._inductor.config.save_config()) == before


def fail(gm: torch.fx.GraphModule, context: Context) -> list[Fired]:
    raise KeyError("a bug of ours")


def test_a_bug_of_ours_is_raised_when_strict_and_otherwise_the_graph_runs_through_inductor(
    block: Block, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(5, 32)
    with register_pass(Pass("failing", fail)):
        with pytest.raises(
            Exception, match=r"pass 'failing' failed \(after tidy, .*rms_norm.*a bug of ours"
        ):
            torch.compile(block, backend="atom", options={"strict": True})(x)
        torch._dynamo.reset()
        with caplog.at_level(logging.WARNING, "atomc"):
            assert_close(
                torch.compile(block, backend="atom", options={"strict": False})(x), block(x)
            )
    assert "Inductor compiles it" in caplog.text
    assert not last().treated and "pass 'failing' failed" in last().why_not
    assert "the graph was not treated: PassError" in last().why("rms_norm")


def test_inputs_that_share_memory_and_are_written_are_left_to_inductor_with_the_reason(
    block: Block,
) -> None:
    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return block(y)

    ours, theirs = torch.randn(6, 32).expand(2, 6, 32).clone()
    theirs.copy_(ours)
    compiled = torch.compile(written, backend="atom", options={"strict": False})
    assert_close(compiled(ours[:4], ours[2:]), written(theirs[:4], theirs[2:]))
    assert "an input that shares memory with another" in last().why_not


def test_a_training_graph_gets_right_gradients_from_inductor_and_one_warning_a_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atomc.compiler.entry._warned", threading.Event())
    torch.manual_seed(0)
    model, twin = Block(), Block()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(5, 32)
    with caplog.at_level(logging.WARNING, "atomc"):
        compiled = torch.compile(model, backend="atom")
        compiled(x).square().sum().backward()
        torch.compile(model.gate, backend="atom")(x)
    twin(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert_close(ours.grad, theirs.grad)
    assert [record.message for record in caplog.records].count(caplog.records[0].message) == 1
    assert "torch.inference_mode()" in caplog.text and "requires_grad_(False)" in caplog.text
    assert not last().treated and "training graph" in last().why_not


def test_evaluation_without_inference_mode_is_right_and_says_why_it_was_not_treated() -> None:
    model = Block().eval()
    x = torch.randn(5, 32)
    assert_close(torch.compile(model, backend="atom")(x), model(x))
    assert "gradients are enabled" in last().why("rms_norm")


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_parameters_that_could_want_gradients_are_treated_when_none_are_recorded(
    context: Any,
) -> None:
    model = Block().eval()
    x = torch.randn(5, 32)
    with context():
        assert_close(torch.compile(model, backend="atom", options=EAGER)(x), model(x))
    assert last().treated


def test_autocast_around_and_inside_keeps_its_dtypes(block: Block) -> None:
    def inside(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = block.gate(x)
        return block.up(y.float())

    x = torch.randn(5, 32)
    compiled = torch.compile(inside, backend="atom", options=EAGER)
    assert torch.equal(compiled(x), inside(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = torch.compile(block.gate, backend="atom", options=EAGER)(x)
        assert around.dtype == torch.bfloat16 and torch.equal(around, block.gate(x))
    assert any("autocast" in note for note in last().notes)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_an_eps_changed_after_the_first_call_is_seen(block: Block, dynamic: bool | None) -> None:
    x = torch.randn(5, 32) * 1e-3
    compiled = torch.compile(block.norm, backend="atom", dynamic=dynamic, options=EAGER)
    for eps in (1e-6, 1e-2, 1e-6, 0.5):
        block.norm.eps = eps
        assert_close(compiled(x), block.norm(x))
    assert all(
        report.treated and report.matches["rms_norm"] == 1 for report in atomc.reports()[-1:]
    )


def test_a_float_that_never_repeats_stays_right() -> None:
    def scaled(x: Tensor, factor: float) -> Tensor:
        return x.sin() * factor

    compiled = torch.compile(scaled, backend="atom", dynamic=True, options=EAGER)
    x = torch.randn(7)
    for i in range(20):
        torch.testing.assert_close(compiled(x, 0.5 + i), scaled(x, 0.5 + i))


def test_a_compiled_submodule_works_inside_an_eager_model(block: Block) -> None:
    x = torch.randn(5, 32)
    expected = block(x)
    block.norm = torch.compile(block.norm, backend="atom", options=EAGER)  # type: ignore[assignment]
    assert_close(block(x), expected)
    assert last().matches["rms_norm"] == 1


def test_two_models_may_share_weights() -> None:
    torch.manual_seed(0)
    one, two = (Block().eval().requires_grad_(False) for _ in range(2))
    two.gate.weight = one.gate.weight
    x = torch.randn(5, 32)
    first, second = (torch.compile(model, backend="atom", options=EAGER) for model in (one, two))
    assert_close(first(x), one(x))
    assert_close(second(x), two(x))
    one.gate.weight.mul_(2)
    assert_close(first(x), one(x))
    assert_close(second(x), two(x))


@pytest.mark.gpu
def test_a_graph_over_two_devices_equals_eager() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.silu(x) * x, (F.silu(y) * y).cpu() + x

    x = torch.randn(5, 32)
    for ours, theirs in zip(
        torch.compile(both, backend="atom")(x, x.cuda()), both(x, x.cuda()), strict=True
    ):
        assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu_runs_there_whatever_the_current_one_is(block: Block) -> None:
    model, x = block.to("cuda:1"), torch.randn(5, 32, device="cuda:1")
    assert torch.cuda.current_device() == 0
    result = torch.compile(model, backend="atom", options=EAGER)(x)
    assert result.device == x.device
    assert_close(result, model(x))


def test_threads_that_compile_at_once_do_not_disturb_each_other() -> None:
    models = [Block(width).eval().requires_grad_(False) for width in (16, 32, 48, 64)]
    inputs = [torch.randn(3, model.gate.in_features) for model in models]
    wrong: list[BaseException] = []

    def work(model: Block, x: Tensor) -> None:
        try:
            assert_close(torch.compile(model, backend="atom", options=EAGER)(x), model(x))
        except BaseException as error:  # whatever happens in a thread must reach the test
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(models, inputs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Lora(nn.Module):
    """A linear with a low-rank update beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base, self.scale = base, 2.0
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * self.scale


def test_linears_wrapped_by_lora_give_the_right_result(block: Block) -> None:
    block.gate = Lora(block.gate, 4).requires_grad_(False)  # type: ignore[assignment]
    x = torch.randn(5, 32)
    assert_close(torch.compile(block, backend="atom", options=EAGER)(x), block(x))
    assert last().matches["silu_and_mul"] == 1 and last().matches["linear"] == 5


def test_the_environment_can_disable_atomc(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOMC_DISABLE", "1")
    x = torch.randn(5, 32)
    assert_close(torch.compile(block, backend="atom")(x), block(x))
    assert not last().treated and "ATOMC_DISABLE" in last().why_not


def test_a_malformed_environment_variable_is_an_error(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOMC_DISABLE", "maybe")
    with pytest.raises(atomc.OptionsError, match="ATOMC_DISABLE='maybe': expected 0 or 1"):
        torch.compile(block, backend="atom")(torch.randn(5, 32))


def test_passes_can_be_left_out_one_by_one(block: Block) -> None:
    x = torch.randn(5, 32)
    compiled = torch.compile(
        block, backend="atom", options={**EAGER, "passes": {"rms_norm": False}}
    )
    assert_close(compiled(x), block(x))
    assert last().matches["rms_norm"] == 0 and last().matches["silu_and_mul"] == 1


def test_inputs_written_in_place_are_written() -> None:
    def step(cache: Tensor, row: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, F.silu(row) * row)
        return cache.sum()

    row, at = torch.randn(2, 4), torch.tensor([1, 3])
    ours, theirs = torch.zeros(5, 4), torch.zeros(5, 4)
    with torch.inference_mode():
        ours, theirs = torch.zeros(5, 4), torch.zeros(5, 4)
        assert torch.equal(
            torch.compile(step, backend="atom", options=EAGER)(ours, row, at), step(theirs, row, at)
        )
    assert torch.equal(ours, theirs) and ours.abs().sum() > 0


def test_outputs_may_be_views_of_inputs_numbers_and_nothing() -> None:
    def several(x: Tensor) -> tuple[Tensor, int, None, Tensor]:
        return x.view(-1), x.shape[0], None, F.silu(x) * x

    x = torch.randn(3, 4)
    view, rows, nothing, product = torch.compile(several, backend="atom", options=EAGER)(x)
    assert view.data_ptr() == x.data_ptr() and (rows, nothing) == (3, None)
    torch.testing.assert_close(product, F.silu(x) * x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.transpose(0, 1), x.mul_(2)),
        lambda x: (x[None], x.zero_()),
        lambda x: (x + 1, x.add_(1)),  # one of the two equal sums is the input
        lambda x: (torch.cat((x.mul_(2), x[:0])),),
    ],
)
def test_outputs_share_the_memory_of_an_input_that_is_written_as_they_do_in_eager(
    function: Any,
) -> None:
    theirs, ours = torch.ones(2, 3), torch.ones(2, 3)
    with torch.inference_mode():
        expected, found = (
            function(theirs),
            torch.compile(function, backend="atom", options={"glue": "eager"})(ours),
        )
        theirs.add_(1)
        ours.add_(1)
    for got, wanted in zip([ours, *found], [theirs, *expected], strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda x: x.t() * 2, (5,)),
        (lambda x: x.transpose(0, -1) * 2, ()),
        (lambda x: F.linear(x, torch.ones(4, 8)), (0, 8)),
        (lambda x: F.layer_norm(x, (8,)), (0, 8)),
        (lambda x: ((y := torch.sub(x, 1, alpha=2)), y.squeeze(0), x.reshape(-1)), (1,)),
    ],
)
def test_vectors_scalars_and_nothing_are_compiled(function: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(
            torch.compile(function, backend="atom", options={"glue": "eager"})(x), function(x)
        )
    assert last().treated


def printed(x: Tensor) -> Tensor:
    torch.ops.aten._print("a line")
    return x + 1


@pytest.mark.parametrize(
    "function, effect",
    [
        (printed, "_print"),
        pytest.param(
            torch.linalg.inv,
            "_linalg_check_errors",
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.11."),
                reason="torch 2.11 compiles linalg.inv without its check",
            ),
        ),
    ],
)
def test_an_op_with_an_effect_besides_its_result_goes_to_inductor_by_name(
    function: Any, effect: str
) -> None:
    x = torch.eye(3) * 2
    compiled = torch.compile(lambda x: function(x), backend="atom", options={"strict": False})
    with torch.inference_mode():
        assert_close(compiled(x), function(x))
    assert f"ops with side effects are not supported: aten.{effect}.default" in last().why_not


def test_a_graph_break_names_the_users_line_and_dynamos_reason(block: Block) -> None:
    def broken(x: Tensor) -> Tensor:
        y = block.norm(x)
        torch._dynamo.graph_break()
        return block.gate(y)

    x = torch.randn(5, 32)
    assert_close(torch.compile(broken, backend="atom", options=EAGER)(x), broken(x))
    (found,) = [report.graph_break for report in atomc.reports()[-2:] if report.graph_break]
    assert found.source.startswith("test_backend.py:") and "graph_break" in found.code
    assert found.reason
    why = atomc.reports()[-2].why("silu_and_mul")
    assert "broken here" in why and found.source in why


def test_a_recompile_names_the_guard_that_failed(block: Block) -> None:
    compiled = torch.compile(block, backend="atom", dynamic=False, options=EAGER)
    compiled(torch.randn(5, 32))
    compiled(torch.randn(6, 32))
    assert last().recompile is not None and "size mismatch" in last().recompile
    assert atomc.reports().recompiles[-1] == last().recompile


def test_a_model_on_the_meta_device_can_be_explained_but_not_run() -> None:
    model = Block().to("meta").requires_grad_(False)
    x = torch.randn(5, 32, device="meta")
    report = atomc.explain(model, x)
    assert report.treated and report.matches["rms_norm"] == 1
    with pytest.raises(
        atomc.RunError, match=r"meta device and cannot run: load its weights, or use atomc\.explain"
    ):
        torch.compile(model, backend="atom")(x)


@pytest.mark.parametrize("by_user", [False, True])
def test_a_compile_seeks_garbage_among_new_objects_only(block: Block, by_user: bool) -> None:
    frozen: list[int] = []

    def note(gm: Any, context: Context) -> list[Fired]:
        frozen.append(gc.get_freeze_count())
        return []

    with shown(), register_pass(Pass("note", note)):
        if by_user:
            gc.freeze()
        torch.compile(block, backend="atom", options=EAGER)(torch.randn(5, 32))
        assert frozen[0] > 10_000
        assert (gc.get_freeze_count() > 0) == by_user


def test_explaining_does_not_run_the_model_and_compiles_nothing(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("Inductor was called")

    monkeypatch.setattr("atomc.backend.inductor", refuse)
    monkeypatch.setattr("atomc.compiler.partition.inductor_code", refuse)
    written = torch.zeros(5, 32)

    def writes(x: Tensor) -> Tensor:
        written.add_(1)
        return block(x)

    report = atomc.explain(writes, torch.randn(5, 32), options={"glue": "inductor"})
    assert report.matches["silu_and_mul"] == 1
    assert written.abs().sum() == 0


@pytest.mark.rotating
def test_explaining_again_and_again_does_not_run_into_a_recompile_limit(block: Block) -> None:
    for _ in range(12):
        assert atomc.explain(block, torch.randn(5, 32)).matches["rms_norm"] == 1


def test_norms_keep_the_models_roundings_when_asked(block: Block) -> None:
    model = block.norm.to(torch.bfloat16)
    x = torch.randn(7, 32, dtype=torch.bfloat16)
    compiled = torch.compile(model, backend="atom", options={"glue": "inductor", "rounding": "hf"})
    assert torch.equal(compiled(x), model(x))
    assert {choice.chosen for choice in last().kernels} == {"torch"}


def test_a_rewrite_of_the_users_joins_the_pipeline() -> None:
    def pattern(x: Tensor, y: Tensor) -> Tensor:
        return torch.sin(x) * torch.cos(y)

    def replacement(x: Tensor, y: Tensor) -> Tensor:
        return ops.silu_and_mul(x, y)  # type: ignore[no-any-return]

    def example() -> dict[str, Any]:
        return {"x": torch.empty(3, 5), "y": torch.empty(3, 5)}

    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.cos(y) * torch.sin(x)

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    with register_pass(atomc.Rewrite("sin_cos", pattern, replacement, example)):
        ours = torch.compile(model, backend="atom", options=EAGER)(x, y)
    assert last().matches["sin_cos"] == 1
    torch.testing.assert_close(ours, F.silu(x) * y)
