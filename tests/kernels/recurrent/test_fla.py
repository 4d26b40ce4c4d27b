"""The gated delta rule by flash-linear-attention (fla): by value over a stand-in, and over fla's own
kernels where it is installed; where it may run, and what it is refused for.

fla's kernels run in Triton's interpreter with two changes (`interpretable`): the first of the tiles
that they would time, as there is nothing to time with, and tensors as the counters of a loop, which
the interpreter makes plain numbers.
"""

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fla_stand_in
import pytest
import torch
from kernel_cases.delta_rule import GATED_DELTA_RULE, packed, ruled
from kernel_cases.draw import Draw
from memory import PoisonedMemory
from refusals import refusal_text
from torch import Tensor, nn

import atomc
from atomc import kernels, ops
from atomc.kernels.fla import delta_rule, library
from atomc.ops.op import refusal
from atomc.platform import Platform

HALVES = (torch.bfloat16, torch.float16)
OPTIONS = {"glue": "eager", "providers": ("fla", "triton", "torch")}
ASKED = replace(Platform.named("h200"), asked=("fla",))
HERE = replace(ASKED, here=True)
[KERNEL] = [kernel for kernel in ops.gated_delta_rule.kernels if kernel.provider == "fla"]
CASES = GATED_DELTA_RULE | {
    "another scale": lambda draw: ruled(draw, 20, (2, 4)) | {"scale": 0.7},
    "another scale, few tokens": lambda draw: ruled(draw, 8, (2, 4)) | {"scale": 0.7},
    "few tokens, batch": lambda draw: ruled(draw, 3, (2, 6), batch=(2, 2)),
    "packed": lambda draw: {
        name: x
        for name, x in packed(draw, [(11, 11)]).items()
        if name in ("q", "k", "v", "g", "beta", "scale")
    },
    "rate in fp32": lambda draw: ruled(draw) | {"beta": draw.normal(9, 2).float().sigmoid()},
}
# Each in a second or less in the interpreter, other cases take up to a minute.
QUICK = ("several tokens", "one token", "odd widths", "another scale, few tokens", "packed")


@pytest.fixture(autouse=True)
def nothing_found_yet() -> Iterator[None]:
    """What the process remembers of fla is forgotten, before and after."""
    for cache in (library.missing, library._found):
        cache.cache_clear()
    yield
    for cache in (library.missing, library._found):
        cache.cache_clear()


def assert_near_reference(arguments: dict[str, Any], roundings: float = 4.0) -> None:
    """The kernel gives what the reference gives in fp32, rounded."""
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    with PoisonedMemory():
        out = delta_rule.gated_delta_rule(**arguments)
    wide = {name: x.float() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    truth, v = ops.gated_delta_rule.reference(**wide), arguments["v"]
    assert (out.shape, out.dtype, out.device) == (v.shape, v.dtype, v.device)
    assert out.is_contiguous()
    assert all(torch.equal(arguments[name], x) for name, x in before.items())
    if out.numel():
        size = truth.square().mean().sqrt()
        error, rounding = (out.float() - truth).abs(), torch.finfo(v.dtype).eps
        assert (error <= roundings * rounding * (truth.abs() + size)).all(), f"{error.max():.3g}"


# ---- over the stand-in


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_rule_is_that_of_the_op(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fla_stand_in.install(monkeypatch)
    arguments = CASES[case](Draw(dtype))
    assert refusal(KERNEL, HERE, arguments) is None
    assert_near_reference(arguments)


@pytest.mark.parametrize(
    ("tokens", "called"), [(0, []), (1, ["recurrent"]), (8, ["recurrent"]), (9, ["chunk"])]
)
def test_few_tokens_are_walked_and_more_are_chunks(
    tokens: int, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fla_stand_in.install(monkeypatch)
    delta_rule.gated_delta_rule(**ruled(Draw(torch.bfloat16), tokens, batch=(3,)))
    assert called == fla_stand_in.CALLS


# ---- where it may run


def wide_keys(draw: Draw) -> dict[str, Any]:
    return ruled(draw, width=(264, 16))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"q": torch.float32, "k": torch.float32, "v": torch.float32}, "q is torch.float32, k is torch.float32, v is torch.float32: written for torch.bfloat16 or torch.float16, all of one dtype"),
        ({"v": torch.float16}, "q is torch.bfloat16, k is torch.bfloat16, v is torch.float16: written for torch.bfloat16 or torch.float16, all of one dtype"),
        ({"g": torch.bfloat16}, "g is torch.bfloat16: written for torch.float32"),
        ({"beta": torch.float64}, "beta is torch.float64: written for torch.bfloat16 or torch.float16 or torch.float32"),
    ],
)  # fmt: skip
def test_the_dtypes_that_it_takes(changed: dict[str, torch.dtype], reason: str | None) -> None:
    arguments = ruled(Draw(torch.bfloat16))
    arguments |= {name: arguments[name].to(dtype) for name, dtype in changed.items()}
    assert refusal_text(KERNEL, ASKED, arguments) == reason


def test_wide_keys_are_refused_and_wide_values_are_not() -> None:
    draw = Draw(torch.bfloat16)
    assert refusal_text(KERNEL, ASKED, wide_keys(draw)) == "keys of 264 exceed the limit of 256"
    assert refusal_text(KERNEL, ASKED, ruled(draw, width=(256, 512))) is None


@pytest.mark.parametrize(
    ("platform", "code", "reason"),
    [
        (Platform.detect("cpu"), "hardware", "fla's kernels run on a GPU"),
        (Platform.named("h200"), "option", "used only if the option `providers` names fla"),
        (replace(ASKED, arch="sm75", capability=(7, 5)), "hardware", "from sm80 on, this is sm75"),
        (ASKED, None, None),
        (replace(Platform.named("gfx942"), asked=("fla",)), None, None),
    ],
)
def test_it_runs_on_gpus_and_only_on_request(
    platform: Platform, code: str | None, reason: str | None
) -> None:
    found = refusal(KERNEL, platform, ruled(Draw(torch.bfloat16)))
    assert (found and found.code) == code
    assert found is None or reason in found.text


def test_a_default_compile_does_not_import_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_found", lambda name: pytest.fail("fla was looked for"))
    arguments = ruled(Draw(torch.bfloat16))
    for platform in (Platform.named("h200"), Platform.detect("cpu")):
        assert refusal(KERNEL, replace(platform, here=True), arguments) is not None


def recurrent_without_norm(q, k, v, g=None, beta=None, scale=None, **kwargs):
    pytest.fail("it was called")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"version": "0.5.1"}, "fla 0.5.1 is too old: pip install 'fla-core>=0.6'"),
        ({"version": "0.10.0"}, None),
        ({"fused_recurrent_gated_delta_rule": recurrent_without_norm}, "fused_recurrent_gated_delta_rule of this fla takes no use_qk_l2norm_in_kernel"),
    ],
)  # fmt: skip
def test_a_version_with_other_functions_is_not_called(
    given: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fla_stand_in.install(monkeypatch, **given)
    arguments = ruled(Draw(torch.bfloat16))
    assert refusal_text(KERNEL, HERE, arguments) == reason
    if reason:
        with pytest.raises(RuntimeError, match="fla"):
            delta_rule.gated_delta_rule(**(arguments | ruled(Draw(torch.bfloat16), 1)))


def test_a_module_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fla_stand_in.install(monkeypatch)
    monkeypatch.setattr(library, "MODULE", "fla.ops.no_such_rule")
    text = refusal_text(KERNEL, HERE, ruled(Draw(torch.bfloat16)))
    assert text and text.startswith("this fla has no fla.ops.no_such_rule.fused_recurrent_gated")


def test_without_fla_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "fla" else found(name, *a)
    )
    reason = refusal_text(KERNEL, HERE, ruled(Draw(torch.bfloat16)))
    assert reason == "not installed: pip install fla-core"


class Layer(nn.Module):
    """The rule of a batch of sequences, without a cache."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.width, self.out = width, nn.Linear(2 * width, width, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return self.out(ops.gated_delta_rule(q, k, v, g, beta, scale=0.3).flatten(-2))


def layer_and_inputs(device: str = "cpu") -> tuple[nn.Module, list[Tensor]]:
    given = ruled(Draw(torch.bfloat16, device), width=(16, 16), batch=(2,))
    layer = Layer().to(device, torch.bfloat16).eval().requires_grad_(False)
    return layer, [given[name] for name in ("q", "k", "v", "g", "beta")]


def choice(report: atomc.Report) -> tuple[str, list[tuple[str, str]]]:
    [found] = [found for found in report.kernels if found.op == "gated_delta_rule"]
    return found.chosen, [refused for refused in found.refused if refused[0] == "fla"]


def test_the_report_shows_fla_where_it_was_asked_for() -> None:
    layer, inputs = layer_and_inputs()
    report = atomc.explain(layer, *inputs, platform="h200", options=OPTIONS)
    assert choice(report) == ("fla", [])
    assert "chunks are rounded to 16 bits in between" in str(report)
    report = atomc.explain(layer, *inputs, platform="h200", options={"glue": "eager"})
    assert choice(report) == ("triton", [])
    report = atomc.explain(layer, *inputs, platform="cpu-zen4", options=OPTIONS)
    assert choice(report) == ("torch", [("fla", "fla's kernels run on a GPU")])


def test_the_ops_with_a_cache_have_no_kernel_of_fla() -> None:
    assert kernels.load("fla") is None
    providers = {
        op: {kernel.provider for kernel in ops.REGISTRY[op].kernels}
        for op in ("gated_delta_rule_update", "conv_gated_delta_rule_update")
    }
    assert not any("fla" in found for found in providers.values())


# ---- over fla's own kernels

INSTALLED = importlib.util.find_spec("fla") is not None
own = pytest.mark.skipif(not INSTALLED, reason="fla is not installed: pip install fla-core einops")


@pytest.fixture
def interpretable(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla's kernels as the interpreter can run them."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: fla's kernels run compiled")
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import interpreter_semantic

    run = Autotuner.run

    def with_the_first_tile(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    def counted(*args: Any) -> Iterator[Any]:
        return (interpreter_semantic.to_tensor(i) for i in range(*args))

    monkeypatch.setattr(Autotuner, "run", with_the_first_tile)
    monkeypatch.setattr(chunk_delta_h, "range", counted, raising=False)


@own
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_flas_own_kernels_compute_the_rule(
    case: str, dtype: torch.dtype, interpretable: None
) -> None:
    assert_near_reference(CASES[case](Draw(dtype)))


@own
def test_the_stand_in_has_flas_arguments_and_their_defaults() -> None:
    from fla.ops import gated_delta_rule

    for name in (delta_rule.RECURRENT, delta_rule.CHUNKS):
        ours = inspect.signature(getattr(fla_stand_in, name)).parameters
        theirs = inspect.signature(getattr(gated_delta_rule, name)).parameters
        both = [parameter for parameter in theirs if parameter in ours]
        assert both == list(ours)
        assert [theirs[p].default for p in both] == [ours[p].default for p in both]


@own
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_fla_computes_the_rule(case: str, dtype: torch.dtype) -> None:
    arguments = CASES[case](Draw(dtype, "cuda"))
    platform = replace(Platform.detect("cuda"), asked=("fla",))
    assert refusal(KERNEL, platform, arguments) is None
    assert_near_reference(arguments, roundings=8.0)


@own
@pytest.mark.gpu
def test_on_a_gpu_a_layer_is_compiled_with_flas_kernel() -> None:
    layer, inputs = layer_and_inputs("cuda")
    with torch.no_grad():
        expected = layer(*inputs)
        found = torch.compile(layer, backend="atom", options=OPTIONS)(*inputs)
    assert choice(atomc.reports()[-1]) == ("fla", [])
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
