"""The scan of Mamba-2: against transformers, in steps of any size, and what it leaves alone."""

from typing import Any

import pytest
import torch
from kernel_cases.draw import Draw
from kernel_cases.ssm import scanned, scanned_from_state
from kernel_grid import name_of
from test_kernels import interpreted, run
from torch import Tensor
from torch.testing import assert_close

from atomc import kernels, ops
from atomc.ops.state import StateSpec

granite = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")

for provider in ("torch", "triton"):
    kernels.load(provider)
UPDATES = [
    kernel
    for kernel in ops.ssm_scan_update.kernels
    if kernel.provider == "torch" or interpreted(kernel, "cpu")
]
PARTS = ("x", "dt", "b", "c")  # with a row for each token


def by_transformers(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    most = given["dt_max"]
    return granite.mamba2_chunk_scan(
        given["x"][None],
        given["dt"][None],
        -torch.exp(given["a_log"]),
        given["b"][None],
        given["c"][None],
        chunk_size=16,
        D=given["d"],
        dt_bias=given["dt_bias"],
        dt_softplus=True,
        dt_limit=(given["dt_min"], float("inf") if most is None else most),
        return_final_states=True,
    )


def rows(given: dict[str, Any], own: slice) -> dict[str, Any]:
    return {name: x[own] if name in PARTS else x for name, x in given.items()}


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("limits", [(0.0, None), (0.5, 1.5)])
@pytest.mark.parametrize(
    "sizes", [(70,), (64, *[1] * 6), (3, 67), (1, 65, 4)], ids=lambda x: str(x)[:12]
)
def test_a_scan_in_steps_of_any_size_has_the_results_and_the_state_of_transformers(
    sizes: tuple[int, ...], limits: tuple[float, float | None]
) -> None:
    given = scanned(Draw(torch.float32), 70, 4, 12, 2, 10, dt_min=limits[0], dt_max=limits[1])
    given["a_log"] -= 2  # so that states last
    expected, last = by_transformers(given)
    assert_close(ops.ssm_scan(**given), expected[0], atol=1e-4, rtol=1e-4)
    for update in (ops.ssm_scan_update, *(kernel.function for kernel in UPDATES)):
        state, found, length = torch.randn(3, 4, 12, 10), [], 0
        before = state.clone()
        for size in sizes:
            own, length = slice(length, length + size), length + size
            step = (ints(0, size), ints(length), torch.tensor([1]))
            names = ("query_start", "seq_lens", "state_slots")
            found.append(
                update(
                    **rows(given, own),
                    recurrent_state=state,
                    **dict(zip(names, step, strict=True)),
                )
            )
        assert_close(torch.cat(found), expected[0], atol=1e-4, rtol=1e-4)
        assert_close(state[1], last[0], atol=1e-4, rtol=1e-4)
        assert torch.equal(state[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("kernel", UPDATES, ids=name_of)
@pytest.mark.parametrize(
    "sequences",
    [[(1, 9), (0, 5), (20, 20), (3, 8), (0, 0)], [(1, 9), (1, 1), (1, 5), (0, 0), (0, 0)]],
    ids=["with prompts", "decode"],
)
def test_padding_of_any_value_and_sequences_without_tokens_change_nothing(
    kernel: ops.Kernel, sequences: list[tuple[int, int]]
) -> None:
    given = scanned_from_state(Draw(torch.float32), sequences, padding=2)
    tokens = int(given["query_start"][-1])
    bare = rows(given, slice(tokens)) | {"recurrent_state": given["recurrent_state"].clone()}
    expected = ops.ssm_scan_update.reference(**bare)
    for name in PARTS:
        given[name] = given[name].clone()
        given[name][tokens:] = float("nan")
    before = given["recurrent_state"].clone()
    out = run(kernel, given)
    assert_close(out[:tokens], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(out[tokens:], torch.zeros_like(out[tokens:]))
    assert_close(given["recurrent_state"], bare["recurrent_state"], atol=1e-4, rtol=1e-4)
    idle = [s for s, (new, _) in enumerate(sequences) if not new]
    others = set(range(len(before))) - set(given["state_slots"].tolist())
    kept = [*given["state_slots"][idle].tolist(), *others]
    assert torch.equal(given["recurrent_state"][kept], before[kept])
    assert given["recurrent_state"].isfinite().all()


def test_a_head_that_forgets_all_at_once_has_a_finite_result() -> None:
    given = scanned(Draw(torch.float32), tokens=70) | {"a_log": torch.tensor([9.0, -9, 3, 0])}
    expected = ops.ssm_scan.reference(**given)
    [kernel] = [k for k in ops.ssm_scan.kernels if k.provider == "torch"]
    found = kernel.function(**given)
    assert found.isfinite().all()
    assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_state_is_described_by_the_call() -> None:
    given = scanned(Draw(torch.bfloat16))
    spec = ops.ssm_scan.state.spec("mixer", given, torch.float8_e4m3fn)
    assert spec == StateSpec.of("mixer", "recurrent", [(4, 12, 10)], torch.float32)
    assert ops.ssm_state(4, 12, 10).shape == (0, 4, 12, 10)


def test_a_kernel_for_gpus_says_what_it_does_not_read() -> None:
    from refusals import refusal_text

    from atomc.platform import Platform

    [kernel] = [k for k in ops.ssm_scan_update.kernels if k.provider == "triton"]
    given = scanned_from_state(Draw(torch.bfloat16), [(1, 5)])
    for changed, sentence in (
        ({"c": given["c"].float()}, "x is torch.bfloat16, b is torch.bfloat16, c is torch.float32"),
        (
            {"recurrent_state": given["recurrent_state"].bfloat16()},
            "recurrent_state is torch.bfloat16",
        ),
        ({"recurrent_state": given["recurrent_state"].mT}, "recurrent_state is not contiguous"),
        ({"b": torch.zeros(1, 2, 300).bfloat16()}, "states of 300 exceed the limit of 256"),
        ({"dt": given["dt"].double()}, "dt is torch.float64: supported are"),
    ):
        text = refusal_text(kernel, Platform.named("h200"), given | changed)
        assert text is not None and text.startswith(sentence), text
