"""zentorch: where it may run, what it is refused for, how it is checked, and that it never reads
stale weights.

Most of it runs with a package of that name that we write here; what needs AMD's own is skipped
where that is absent.
"""

import gc
import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import refusal_text
from torch import Tensor, nn

import atomc
from atomc import kernels, ops, platform
from atomc.kernels.zentorch import library
from atomc.ops.formats import pack_int4
from atomc.platform import Platform

# The ops that we call, as zentorch computes them, with its habit of remembering a weight by its
# address.
FAKE = """
import torch
from torch import Tensor

HOW = {how!r}
schemas = [
    "zentorch_qlinear(Tensor input, Tensor weight, Tensor input_scales, Tensor input_zero_points, Tensor weight_scales, "
    "Tensor weight_zero_points, Tensor? bias, Tensor? output_scales, Tensor? output_zero_points, "
    "ScalarType? output_dtype=None) -> Tensor",
    "zentorch_qlinear.out(Tensor(a!) out, Tensor input, Tensor weight, Tensor input_scales, Tensor input_zero_points, "
    "Tensor weight_scales, Tensor weight_zero_points, Tensor? bias, Tensor? output_scales, Tensor? output_zero_points, "
    "ScalarType? output_dtype=None) -> ()",
    "zentorch_woq_linear(Tensor input, Tensor weight, Tensor weight_scales, Tensor? weight_zero_points, Tensor? bias=None) "
    "-> Tensor",
    "zentorch_woq_linear.out(Tensor input, Tensor weight, Tensor weight_scales, Tensor? weight_zero_points, "
    "Tensor? bias=None, *, Tensor(a!) out) -> ()",
    "zentorch_clear_weight_cache() -> ()",
]
packed = {{}}


def qlinear(x, weight, x_scale, x_zero, scale, zeros, bias=None, out_scale=None, out_zero=None, dtype=None):
    if HOW == "killed":
        import os
        os.kill(os.getpid(), 4)
    kept = packed.setdefault(weight.data_ptr(), weight.clone())
    total = x.double() @ kept.double().t() * scale.double() * x_scale.double()
    return total.to(dtype) * (3 if HOW == "wrong" else 1)


def qlinear_out(out, *args):
    out.copy_(qlinear(*args, out.dtype) if len(args) < 9 else qlinear(*args))


def woq_linear(x, weight, scale, zeros, bias=None):
    words = weight.t()
    codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(-2)
    group = codes.shape[1] // scale.shape[0]
    codes = codes.view(len(codes), -1, group) - zeros.t().unsqueeze(-1)
    total = x.double() @ (codes.double() * scale.t().double().unsqueeze(-1)).flatten(1).t()
    return (total if bias is None else total + bias).to(x.dtype)


def woq_linear_out(x, weight, scale, zeros, bias=None, *, out):
    if HOW != "unwritten":
        out.copy_(woq_linear(x, weight, scale, zeros))


library = torch.library.Library("zentorch", "DEF")
if HOW == "lacking":
    schemas = schemas[2:]
for schema in schemas:
    library.define(schema)
for name, function in {{"zentorch_qlinear": qlinear, "zentorch_qlinear.out": qlinear_out, "zentorch_woq_linear": woq_linear,
                       "zentorch_woq_linear.out": woq_linear_out}}.items():
    if HOW != "lacking" or "woq" in name:
        library.impl(name, function, "CPU")
library.impl("zentorch_clear_weight_cache", packed.clear, "CompositeExplicitAutograd")
"""


def install(folder: Path, text: str) -> None:
    """Put a package named zentorch, built for this torch, into the folder."""
    (folder / "zentorch").mkdir()
    (folder / "zentorch/__init__.py").write_text(text)
    version = f"{torch.__version__.partition('+')[0]}.7"
    info = folder / f"zentorch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: zentorch\nVersion: {version}\n")


@pytest.fixture
def nothing_found_yet() -> Iterator[None]:
    """What the process remembers of zentorch is forgotten, before and after."""
    caches = (library.missing, library.checked, library.function)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def int8_arguments(rows: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-127, 128, (n, 64), generator=generator, dtype=torch.int8) for n in (rows, 16)
    )
    return {
        "x": x,
        "weight": weight,
        "x_scale": torch.rand(rows, 1),
        "weight_scale": torch.rand(16, 1),
        "out_dtype": dtype,
    }


def int4_arguments(rows: int = 3) -> dict[str, object]:
    weight = pack_int4(torch.randint(0, 16, (16, 64), generator=torch.Generator().manual_seed(0)))
    return {
        "x": torch.randn(rows, 64).bfloat16(),
        "weight": weight,
        "weight_scale": torch.rand(16, 2).bfloat16(),
        "group": 32,
    }


def kernels_of(op: str) -> list[ops.Kernel]:
    assert kernels.load("zentorch") is None
    return [kernel for kernel in ops.REGISTRY[op].kernels if kernel.provider == "zentorch"]


[INT8], [INT4, INT4_FEW] = kernels_of("scaled_linear_int8"), kernels_of("linear_w4a16")
INTEL = (
    "zentorch supports AMD CPUs, this is one of GenuineIntel; its int8 layers with fp32 output "
    "can be enabled by "
)
GATE = [
    ("cpu-zen4", (), None, None),
    ("cpu-zen5", (), None, None),
    (
        "cpu-zen3",
        (),
        "zentorch needs avx512_bf16 and avx512_vnni and avx512bw",
        "zentorch needs avx512_bf16",
    ),
    ("cpu-cascadelake", (), INTEL, "zentorch needs avx512_bf16, which this CPU does not have"),
    ("cpu-sapphirerapids", (), INTEL, INTEL),
    (
        "cpu-cascadelake",
        ("zentorch",),
        None,
        "zentorch needs avx512_bf16, which this CPU does not have",
    ),
    ("cpu-sapphirerapids", ("zentorch", "onednn"), None, INTEL),
    (
        "cpu-neoverse-v2",
        ("zentorch",),
        "written for x86 CPUs, this is aarch64",
        "written for x86 CPUs, this is aarch64",
    ),
    ("h200", (), "written for x86 CPUs, this is sm90", "written for x86 CPUs, this is sm90"),
]


@pytest.mark.parametrize(("name", "asked", "int8", "int4"), GATE)
def test_the_cpu_decides_before_the_package_is_looked_at(
    name: str, asked: tuple[str, ...], int8, int4
) -> None:
    where = replace(Platform.named(name), asked=asked)
    for kernel, arguments, expected in (
        (INT8, int8_arguments(), int8),
        (INT4, int4_arguments(), int4),
    ):
        reason = refusal_text(kernel, where, arguments)
        assert reason is None if expected is None else str(reason).startswith(expected)


def test_int8_layers_for_bf16_want_a_cpu_of_amd_even_if_asked_for() -> None:
    intel = replace(Platform.named("cpu-sapphirerapids"), asked=("zentorch",))
    assert str(refusal_text(INT8, intel, int8_arguments(dtype=torch.bfloat16))).startswith(INTEL)


ZEN4 = Platform.named("cpu-zen4")
WRONG = [
    (INT8, {"weight": torch.zeros(64, 16, dtype=torch.int8).t()}, "the weight is not contiguous"),
    (INT8, {"weight": torch.zeros(16, 64, dtype=torch.uint8)}, "weight is torch.uint8: written for torch.int8"),
    (INT8, {"weight_scale": torch.ones(16, 1, dtype=torch.float16)},
     "the scales of the weight are torch.float16 [16, 1], expected one in fp32 per output"),
    (INT8, {"weight_scale": torch.ones(1)}, "the scales of the weight are torch.float32 [1], expected one in fp32"),
    (INT4, {"x": torch.zeros(3, 64)}, "x is torch.float32: zentorch has this for torch.bfloat16"),
    (INT4, {"x": torch.zeros(3, 64, dtype=torch.float16)}, "x is torch.float16: zentorch has this for torch.bfloat16"),
    (INT4, {"weight_scale": torch.ones(16, 2, dtype=torch.float64)}, "the scales of the weight are torch.float64 [16, 2]"),
    (INT4, {"weight_scale": torch.ones(2, 16)}, "the scales of the weight are torch.float32 [2, 16], expected floats"),
    (INT4, {"weight": torch.zeros(16, 16, dtype=torch.int32)[:, ::2]}, "the weight is not contiguous"),
    (INT4, {"zeros": torch.zeros(2, 16, dtype=torch.uint8)}, "the zero points are torch.uint8 [2, 16], expected uint8 [16"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "given", "reason"), WRONG)
def test_what_zentorch_would_take_and_compute_wrong_is_refused(
    kernel: ops.Kernel, given, reason: str
) -> None:
    arguments = int8_arguments() if kernel is INT8 else int4_arguments()
    assert str(refusal_text(kernel, ZEN4, arguments | given)).startswith(reason)


def test_few_rows_of_int4_are_left_to_pytorchs_kernel_unless_it_cannot_or_zentorch_is_asked_for() -> (
    None
):
    faster = "PyTorch's own kernel is faster for fewer than 32 rows"
    assert refusal_text(INT4_FEW, ZEN4, int4_arguments()) == faster
    assert (
        refusal_text(INT4_FEW, replace(ZEN4, asked=("zentorch", "onednn")), int4_arguments())
        is None
    )
    odd = {
        "weight": torch.zeros(9, 8, dtype=torch.int32),
        "weight_scale": torch.ones(9, 2).bfloat16(),
    }
    assert refusal_text(INT4_FEW, ZEN4, int4_arguments() | odd) is None


@pytest.mark.covering
@pytest.mark.parametrize(
    ("how", "int8", "int4"),
    [
        (
            "killed",
            "zentorch did not compute int8 in a check: the process was killed by signal 4",
            "zentorch did not compute int4 in a check: the process was killed by signal 4",
        ),
        (
            "lacking",
            "zentorch cannot compute int8: AttributeError: '_OpNamespace' 'zentorch' object "
            "has no attribute",
            None,
        ),
        (
            "wrong",
            "zentorch computes int8 wrong here: -6 dB above the error, expected are 40",
            None,
        ),
        ("unwritten", None, "zentorch computes int4 wrong here: nan dB above the error"),
        (
            "absent",
            "zentorch did not compute int8 in a check: the process ended with 1: ",
            "zentorch did not compute",
        ),
    ],
)
def test_what_zentorch_computes_is_checked_in_a_process_of_its_own(
    how: str, int8, int4, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_found_yet
) -> None:
    install(
        tmp_path,
        FAKE.format(how=how)
        if how != "absent"
        else "raise OSError('libzentorch.so: no such file')",
    )
    monkeypatch.syspath_prepend(tmp_path)
    for kind, expected in (("int8", int8), ("int4", int4)):
        reason = library.unproven(kind)
        assert reason is None if expected is None else reason.text.startswith(expected)
    assert (
        library.checked() is library.checked()
        and 0 < library.checked().seconds < library.CHECK_TIMEOUT
    )


@pytest.fixture
def zen4_here(monkeypatch: pytest.MonkeyPatch, nothing_found_yet) -> Platform:
    """This machine, taken for a Zen 4 about whose zentorch nothing is known."""
    here = replace(ZEN4, here=True, memory=Platform.detect("cpu").memory)
    monkeypatch.setattr(platform, "_cpu_here", lambda: here)
    return here


def without_zentorch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == "zentorch" else find_spec(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)


def test_who_could_expect_zentorch_is_told_once_why_it_is_not_used(
    zen4_here, monkeypatch, caplog
) -> None:
    without_zentorch(monkeypatch)
    with caplog.at_level(logging.WARNING, "atomc"):
        reasons = {
            refusal_text(INT8, zen4_here, int8_arguments()),
            refusal_text(INT4, zen4_here, int4_arguments()),
            refusal_text(INT8, zen4_here, int8_arguments()),
        }
    assert reasons == {"not installed: pip install zentorch"}
    assert [record.getMessage() for record in caplog.records] == [
        "zentorch would run quantized linears on this CPU, and is not used: not installed: pip "
        "install zentorch"
    ]


def test_nobody_is_told_where_zentorch_would_not_run(caplog) -> None:
    intel = replace(Platform.named("cpu-sapphirerapids"), here=True)
    with caplog.at_level(logging.INFO, "atomc"):
        assert str(refusal_text(INT8, intel, int8_arguments())).startswith(INTEL)
    assert caplog.records == []


def test_a_package_that_does_not_load_is_a_reason(
    zen4_here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "zentorch" in sys.modules:
        pytest.skip("zentorch is loaded in this process already")
    install(tmp_path, "raise OSError('libgomp.so.1: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be imported: OSError: libgomp.so.1: no such file" in str(
        refusal_text(INT8, zen4_here, int8_arguments())
    )


@pytest.fixture
def fake_zentorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "zentorch" in sys.modules:
        pytest.skip("zentorch is loaded in this process already")
    install(tmp_path, FAKE.format(how="right"))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    module = sys.modules.pop("zentorch", None)
    if module is not None:
        # Weights that go later would call an op which is no more.
        torch._dynamo.reset()
        gc.collect()
        module.library._destroy()


class Mlp(nn.Module):
    """Two layers of one input, and one more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up, self.down = (
            nn.Linear(64, 96),
            nn.Linear(64, 96, bias=False),
            nn.Linear(96, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def quantized(scheme: str, dtype: torch.dtype) -> nn.Module:
    return atomc.quantize(Mlp().to(dtype).eval().requires_grad_(False), scheme)


def chosen() -> set[str]:
    return {choice.chosen for choice in atomc.reports()[-1].kernels if "linear" in choice.op}


EAGER = {"glue": "eager"}
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


def compare(scheme: str, dtype: torch.dtype) -> None:
    """Compiled as eager, after writing into weights, and for another model in the memory of one
    that is gone.
    """
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float32 else {"rtol": 1e-4, "atol": 1e-5}
    )
    for _ in range(2):
        torch._dynamo.reset()
        model = quantized(scheme, dtype)
        compiled = torch.compile(
            model, backend="atom", options={**EAGER, "providers": ("zentorch", "torch")}
        )
        for change in (1, -1):
            for layer in (model.gate, model.down):
                layer.weight_scale.mul_(1 + torch.rand(1).item())
                layer.weight.mul_(change) if scheme == "int8" else layer.weight.bitwise_xor_(change)
            for rows in (5, 1):
                torch.testing.assert_close(
                    compiled(X[:rows].to(dtype)), model(X[:rows].to(dtype)), **tolerance
                )
        assert chosen() == {"zentorch"}
        del model, compiled


@pytest.mark.rotating
@pytest.mark.parametrize(("scheme", "dtype"), [("int8", torch.float32), ("int4", torch.bfloat16)])
@torch.no_grad()
def test_a_quantized_model_runs_by_zentorch_and_never_reads_stale_weights(
    scheme: str, dtype: torch.dtype, zen4_here, fake_zentorch
) -> None:
    compare(scheme, dtype)


@torch.no_grad()
def test_where_zentorch_refuses_another_kernel_runs_and_the_report_says_why(
    zen4_here, monkeypatch
) -> None:
    without_zentorch(monkeypatch)
    model = quantized("int8", torch.float32)
    # Its numbers are not compared: oneDNN's kernel is exact on a Zen 4 alone, and this may be
    # another CPU.
    torch.compile(model, backend="atom", options=EAGER)(X)
    [choice, *_] = [
        choice for choice in atomc.reports()[-1].kernels if choice.op == "scaled_linear_int8"
    ]
    assert choice.chosen in ("onednn", "inline")
    assert ("zentorch", "not installed: pip install zentorch") in choice.refused


HERE = Platform.detect("cpu")
REAL = importlib.util.find_spec("zentorch") is not None
with_amds_own = pytest.mark.skipif(not REAL, reason="zentorch is not installed")


@with_amds_own
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("int8", torch.float32), ("int8", torch.bfloat16), ("int4", torch.bfloat16)],
)
@torch.no_grad()
def test_amds_zentorch_computes_the_same(scheme: str, dtype: torch.dtype) -> None:
    if reason := library.unfit(
        replace(HERE, asked=("zentorch",)), "int8", needs_bf16=dtype == torch.bfloat16
    ):
        pytest.skip(reason.text)
    compare(scheme, dtype)


@with_amds_own
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (4, 7, 3), (5, 1001, 17), (70, 4097, 129)]
)
def test_amds_zentorch_multiplies_odd_sizes_right(rows: int, inputs: int, outputs: int) -> None:
    if reason := library.unfit(replace(HERE, asked=("zentorch",)), "int8", needs_bf16=False):
        pytest.skip(reason.text)
    x, weight = (torch.randint(-127, 128, (n, inputs), dtype=torch.int8) for n in (rows, outputs))
    given = {
        "x": x,
        "weight": weight,
        "x_scale": torch.rand(rows, 1),
        "weight_scale": torch.rand(outputs, 1),
        "bias": torch.randn(outputs),
        "out_dtype": torch.float32,
    }
    prepared = {
        names[0]: prepare(*map(given.get, names)).tensors
        for names, prepare in INT8.prepares.items()
    }
    found = INT8.function(**given | prepared)
    torch.testing.assert_close(
        found, ops.scaled_linear_int8.reference(**given), rtol=1e-5, atol=1e-3
    )
