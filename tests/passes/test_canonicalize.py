"""The pass that writes norms and activations in one spelling changes only what an op may replace."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import TIDY, after_passes, explained
from torch import Tensor

import atomc
from atomc import passes
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context

CANONICALIZE = next(p for p in passes.PIPELINE if p.name == "canonicalize")
T, D = 7, 33


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


X, Y, W = random(T, D), random(T, D), random(D)


def changed(function, *inputs: Tensor, dynamic: bool = False, **options: object) -> int:
    """How many places the pass changes."""
    context = Context(Options(strict=True, **options), Platform.detect("cpu"))
    traced = after_passes([TIDY, CANONICALIZE], function, *inputs, dynamic=dynamic, context=context)
    return sum(stage.changed for stage in traced.report.stages if stage.name == "canonicalize")


def root(x: Tensor, dim: int = -1) -> Tensor:
    return torch.sqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6)


def doubled(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x + x * 0.5
    return x


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: x / torch.sqrt(y.abs() + 1), id="a root of something else"),
        pytest.param(lambda x, y: x / root(x, dim=0), id="a mean over rows"),
        pytest.param(
            lambda x, y: torch.div(x, root(x), rounding_mode="floor") * y[0], id="a rounded norm"
        ),
        pytest.param(lambda x, y: y / root(x), id="another row than that of the mean, weightless"),
        pytest.param(lambda x, y: x.square().sum(-1, keepdim=True) / (D - 1), id="sum / (n - 1)"),
        pytest.param(lambda x, y: x * torch.sigmoid(x), id="an activation that is not multiplied"),
        pytest.param(lambda x, y: x * torch.sigmoid(y) * y, id="a sigmoid of the other operand"),
        pytest.param(lambda x, y: x / (2 + torch.exp(-x)) * y, id="2 + exp(-x)"),
        pytest.param(
            lambda x, y: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3))) * y,
            id="a GELU with another factor",
        ),
        pytest.param(lambda x, y: 0.5 * x * (1 + torch.erf(x)) * y, id="erf(x)"),
        pytest.param(lambda x, y: F.silu(x) * y, id="the spelling of the op"),
        pytest.param(lambda x, y: torch.tanh(x**y + x) * y, id="a power of two tensors"),
        pytest.param(lambda x, y: torch.tanh(x / y.sum() - 2 * x) * y, id="a quotient of two"),
        pytest.param(lambda x, y: torch.tanh(doubled(x, 40)) * y, id="a very large polynomial"),
    ],
)
def test_what_no_op_replaces_stays_as_it_is(function):
    assert changed(function, X, Y) == 0


def silu_gate(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.sigmoid(x) * y


def rounded_root(x: Tensor, y: Tensor) -> Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


@pytest.mark.parametrize("function", [silu_gate, rounded_root])
@pytest.mark.parametrize(
    ("dtype", "rounding", "expected"),
    [
        (torch.bfloat16, "fp32", 1),
        (torch.float16, "fp32", 1),
        (torch.bfloat16, "hf", 0),
        (torch.float32, "hf", 1),
    ],
)
def test_roundings_to_16_bits_are_kept_if_the_option_says_so(function, dtype, rounding, expected):
    report = explained(
        function, X.to(dtype), Y.to(dtype), tolerance=1e-2 if expected else 0.0, rounding=rounding
    )
    assert report.matches["silu_and_mul"] + report.matches["rms_norm"] == expected


def residual_norm(x: Tensor, residual: Tensor, w: Tensor, written: str) -> tuple[Tensor, ...]:
    """As vLLM writes it, in its versions; its last norm does not return the sum."""
    total = x.to(torch.float32) + (residual if written == "promotes" else residual.float())
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = normed.to(x.dtype) * w
    return (y,) if written == "last" else (y, total.to(x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("written", ["", "promotes", "last"])
def test_a_residual_that_is_added_in_fp32_joins_its_norm(dtype, written):
    arguments = [t.to(dtype) for t in (X, Y, W)]
    compiled = torch.compile(residual_norm, backend="atom", options={"glue": "eager"})
    found, expected = compiled(*arguments, written), residual_norm(*arguments, written)
    assert atomc.reports()[-1].matches["add_rms_norm"] == 1
    rounding = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0], expected[0], rtol=rounding, atol=rounding)
    torch.testing.assert_close(found[1:], expected[1:], rtol=0, atol=0)  # the sums
    total = X.to(dtype) + Y.to(dtype)
    fused = atomc.ops.add_rms_norm.reference(*arguments, 1e-6)
    torch.testing.assert_close(found[0], fused[0], rtol=0, atol=0)
    torch.testing.assert_close(fused[1], total, rtol=0, atol=0)


def test_a_residual_that_is_added_in_fp32_is_not_rounded_if_roundings_are_kept():
    arguments = [t.to(torch.bfloat16) for t in (X, Y, W)]
    report = explained(lambda *a: residual_norm(*a, ""), *arguments, tolerance=0.0, rounding="hf")
    assert "a sum in fp32 with a residual, which the option rounding='hf'" in report.why("rms_norm")


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y, w: (*residual_norm(x, y, w, ""), x.float() + y.float()),
        lambda x, y, w: residual_norm(x, y.float() * 1.001, w, "promotes"),
        lambda x, y, w: residual_norm(x.float() * 1.001, y, w.float(), ""),
    ],
    ids=["the sum is read in fp32", "the residual is in fp32", "all in fp32"],
)
def test_a_sum_that_stays_in_fp32_is_not_rounded(change):
    explained(change, *[t.to(torch.bfloat16) for t in (X, Y, W)], tolerance=0.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: w * (x / root(x)),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)[..., None]),
        lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / D + 1e-6)),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ],
    ids=["division", "unsqueeze", "sum", "no weight"],
)
def test_norms_with_a_symbolic_number_of_rows_are_recognized(function):
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    report = explained(function, x, W, dynamic=None, tolerance=1e-6)
    assert report.matches["rms_norm"] == 1


def test_norms_without_a_weight_share_their_ones():
    def both(x):
        x = F.rms_norm(x, (D,))
        return F.rms_norm(x.sin(), (D,))

    traced = after_passes([TIDY, CANONICALIZE], both, X)
    assert traced.text.count("full(") == 1


def test_a_norm_without_a_weight_takes_the_add_before_it():
    report = explained(lambda x, y: (F.rms_norm(x + y, (D,)), x + y), X, Y, tolerance=1e-6)
    assert report.matches["add_rms_norm"] == 1


def test_a_row_that_stays_in_fp32_gets_no_weight():
    def wide(x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    assert changed(wide, X.bfloat16()) == 0


def test_the_pass_can_be_turned_off():
    recognized = ["silu_and_mul", "gelu_and_mul", "sigmoid_and_mul", "rms_norm"]
    report = explained(silu_gate, X, Y, off=["canonicalize", *recognized])
    assert not report.matches


@pytest.mark.parametrize(
    "part", [torch.unbind, torch.max, torch.Tensor.frexp], ids=lambda f: f.__name__
)
def test_a_norm_of_one_of_several_results_is_recognized(part):
    def norm(x, w):
        x = (part(x, 0) if part is not torch.Tensor.frexp else part(x))[0]
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    report = explained(norm, random(2, T, D), W, tolerance=1e-6)
    assert report.matches["rms_norm"] == 1
