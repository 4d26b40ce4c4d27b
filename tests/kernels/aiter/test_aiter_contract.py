"""What our kernels hand to AITER's functions fits their signatures, and kernels refuse what AITER
does not take.
"""

import contextlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import ARCHS, KERNELS, cases, prepared
from kernel_cases.draw import Draw
from kernel_cases.mla import split_and_joined
from kernel_cases.scaled_linear import mxfp4_operands

from atomc import ops
from atomc.kernels.aiter import library
from atomc.ops.op import Kernel, refusal
from atomc.platform import Platform

API = Path(__file__).parent / "api.json"
# Not in the list of signatures; a stubbed import has them (test_aiter_proofs.py).
UNLISTED = {"rope_cached_fwd_impl", "triton.rope_cached_fwd", "triton._gemm_splitk_reduce_kernel"}


class Called(Exception):
    """Ends a kernel at its call of AITER."""


def short(function: library.Function) -> str:
    return f"{'triton.' * ('triton' in function.modules[0])}{function.name}"


def listed() -> dict[str, inspect.Signature]:
    """The signatures of AITER's functions, from a list: a name alone is required, a name with "="
    has a default, those behind "*" are passed by name.
    """
    found = {}
    for path, spelled in json.loads(API.read_text())["signatures"].items():
        head, _, tail = spelled.partition("*")
        parameters = [
            inspect.Parameter(
                name.removesuffix("="),
                kind,
                default=None if name.endswith("=") else inspect.Parameter.empty,
            )
            for kind, names in (
                (inspect.Parameter.POSITIONAL_OR_KEYWORD, head),
                (inspect.Parameter.KEYWORD_ONLY, tail),
            )
            for name in names.split()
        ]
        in_triton = "triton." * (".triton." in path)
        found[f"{in_triton}{path.rpartition('.')[2]}"] = inspect.Signature(parameters)
    return found


SIGNATURES = listed()


Call = tuple[library.Function, tuple[Any, ...], dict[str, Any]]


def calls(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the kernel calls, over the cases that it takes on AITER's architectures: the first call,
    or all calls if it needs results of the first ones, from stand-ins.
    """
    made = []

    def note(function: library.Function, *args: Any, **kwargs: Any) -> Any:
        made.append((function, args, kwargs))
        if kernel.shared is None:
            raise Called
        return stand_ins.of(function)(*args, **kwargs)

    monkeypatch.setattr(library.Function, "__call__", note)
    for arch in ARCHS:
        stand_ins.ARCH.set(arch)
        for name, make in cases(kernel, arch).items():
            if name.startswith(("many", "wide")):
                continue
            given = make(Draw(torch.bfloat16, layout=kernel.layout or "paged"))
            if refusal(kernel, Platform.named(arch), given) is None:
                with contextlib.suppress(Called):
                    kernel.function(**prepared(kernel, given))
    return made


@pytest.mark.parametrize("name", KERNELS)
def test_every_call_binds_to_the_signature_of_aiters_function(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(KERNELS[name], monkeypatch)
    assert made, "it refuses all cases, or calls nothing"
    if name.endswith(".mla_absorbed_attention") and KERNELS[name].shared is not None:
        assert len({repr(function) for function, _, _ in made}) >= 3
    for function, args, kwargs in made:
        if short(function) not in UNLISTED:
            SIGNATURES[short(function)].bind(*args, **kwargs)
            assert set(function.takes) <= SIGNATURES[short(function)].parameters.keys()


def test_functions_without_a_listed_signature_are_known() -> None:
    assert {short(function) for function in library.FUNCTIONS} - SIGNATURES.keys() == UNLISTED


@pytest.mark.parametrize("path", stand_ins.STAND_INS, ids=".".join)
def test_a_stand_in_takes_the_arguments_of_aiters_function(path: tuple[str, str]) -> None:
    name = f"{'triton.' * ('.triton.' in path[0])}{path[1]}"
    if name in UNLISTED:
        return
    own = inspect.signature(stand_ins.STAND_INS[path]).parameters.values()
    theirs = SIGNATURES[name].parameters.values()
    assert [(p.name, p.default is p.empty) for p in own] == [
        (p.name, p.default is p.empty) for p in theirs
    ]


GATE, UP = torch.randn(5, 128, dtype=torch.bfloat16).chunk(2, -1)


def reasons(op: ops.Op, platform: Platform, **given: Any) -> list[str | None]:
    refused = [
        refusal(kernel, platform, given) for kernel in op.kernels if kernel.provider == "aiter"
    ]
    return [found and found.text for found in refused]


def test_aiter_serves_amds_gpus_alone() -> None:
    assert reasons(ops.silu_and_mul, Platform.named("gfx950"), gate=GATE, up=UP) == [None]
    assert reasons(ops.silu_and_mul, Platform.named("sm90"), gate=GATE, up=UP) == [
        "AITER runs on AMD GPUs"
    ]
    gfx90a = replace(Platform.named("gfx942"), arch="gfx90a")
    assert reasons(ops.silu_and_mul, gfx90a, gate=GATE, up=UP) == [
        "AITER's kernels are used on gfx942 and gfx950, this is gfx90a"
    ]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which AITER is looked for anew, and no longer after the test."""
    stand_ins.forget()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "aiter/ops").mkdir(parents=True)
    yield tmp_path / "aiter"
    stand_ins.forget()


def test_the_unrelated_aiter_is_the_reason(installed: Path) -> None:
    (installed / "__init__.py").write_text("")
    [reason] = reasons(
        ops.silu_and_mul, replace(Platform.named("gfx950"), here=True), gate=GATE, up=UP
    )
    assert (
        reason
        == "the installed package `aiter` is another project, not AMD's: pip install amd-aiter"
    )


def test_an_installation_that_fails_in_its_own_way_is_a_reason(installed: Path) -> None:
    (installed / "ops/enum.py").write_text("")
    (installed / "__init__.py").write_text("raise RuntimeError('ROCm version file not found')")
    [reason] = reasons(
        ops.silu_and_mul, replace(Platform.named("gfx950"), here=True), gate=GATE, up=UP
    )
    assert reason is not None and reason.endswith(
        "cannot be imported: RuntimeError: ROCm version file not found"
    )


def test_a_function_that_this_version_lacks_is_named(installed: Path) -> None:
    (installed / "ops/enum.py").write_text("")
    (installed / "__init__.py").write_text("def rmsnorm2d_fwd_with_add(out, input, residual): ...")
    here = replace(Platform.named("gfx950"), here=True)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    [compiled, in_triton] = reasons(ops.add_rms_norm, here, x=x, residual=x, weight=x[0], eps=1e-5)
    assert (
        compiled == "this AITER has no aiter.rmsnorm2d_fwd_with_add that we can call (it takes no "
        "gemma_norm)"
    )
    assert in_triton is not None and "No module named 'aiter.ops.triton'" in in_triton


def test_a_version_that_reads_scales_past_the_end_gets_rows_of_whole_blocks(
    installed: Path,
) -> None:
    (installed / "ops/enum.py").write_text("")
    (installed / "__init__.py").write_text("")
    here = replace(Platform.named("gfx950"), here=True)
    module = installed / "ops/triton/gemm_afp4wfp4.py"
    module.parent.mkdir()
    module.write_text("def gemm_afp4wfp4(x, w, x_scales, w_scales, dtype): ...")
    given = {
        width: mxfp4_operands(Draw(torch.bfloat16), 3, width, activation="mxfp4")
        for width in (256, 288, 512)
    }
    said = {
        (platform.here, width): reasons(ops.linear_mxfp4, platform, **operands)[-1]
        for platform in (here, Platform.named("gfx950"))
        for width, operands in given.items()
    }
    assert (
        said.pop((True, 288))
        == "rows of 288: this AITER reads scales of 256 at a time, past the end of the last row"
    )
    assert set(said.values()) == {None}


def test_the_latents_product_in_mxfp4_gets_rows_of_whole_blocks() -> None:
    draw, platform = Draw(torch.bfloat16), Platform.named("gfx950")
    widths = (128, 160, 512, 1536, 2048)
    said = {
        width: reasons(
            ops.linear_split_cat, platform, **split_and_joined(draw, "mxfp4", latent=width)
        )[-1]
        for width in widths
    }
    assert said == dict.fromkeys(widths) | {
        width: f"rows of {width}: AITER reads scales of 1024 at a time, past the end of the "
        "last row"
        for width in (160, 1536)
    }
