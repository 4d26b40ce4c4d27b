"""The gates of a gated delta net become one op, and with its convolution and its rule another one;
what keeps them apart; and how the programs of a decoding step share the inputs of a key head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_blockers import GIVEN, ruled
from kernel_cases.attention import DECODE
from kernel_cases.conv_delta_rule import in_steps
from kernel_cases.draw import Draw
from refusals import refusal_text
from rewriting import after_passes, explained, rewritten
from torch import Tensor
from torch.testing import assert_close

from atomc import kernels, ops
from atomc.kernels.triton.recurrent import conv_delta_rule
from atomc.passes.fuse.conv_delta_rule import NAME, conv_gated_delta_rule
from atomc.passes.recognize.delta_gates import DELTA_GATES
from atomc.passes.reinplace import reinplace
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Pass

# H key heads, N value heads, K their width, C channels.
H, N, K = 2, 4, 8
C = (2 * H + N) * K
Change = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    return x


def test_the_gates_of_a_delta_rule_become_one_op() -> None:
    assert (
        rewritten(DELTA_GATES, ruled(), *GIVEN)
        == """\
%0 = delta_gates(a, b, a_log, dt_bias, 1.0)
%1 = gated_delta_rule(x, x, x, %0.0, %0.1, scale=0.25)
return %1"""
    )


@pytest.mark.parametrize("of_parameters", [torch.bfloat16, torch.float32], ids=str)
def test_a_scaled_rate_and_parameters_in_fp32_are_gates_too(of_parameters: torch.dtype) -> None:
    parameters = (each.to(of_parameters) for each in GIVEN[3:])
    text = rewritten(DELTA_GATES, ruled(after_rate=lambda b: b * 2.0), *GIVEN[:3], *parameters)
    assert "delta_gates(a, b, a_log, dt_bias, 2.0)" in text


def test_gates_without_a_delta_rule_are_left_alone() -> None:
    def alone(x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        return -a_log.float().exp() * F.softplus(a.float() + dt_bias) + b.sigmoid()

    rewritten(DELTA_GATES, alone, *GIVEN, matches=0)


def layer(
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
    *,
    order: tuple[int, int, int] = (0, 1, 2),
    after_conv: Change = same,
    after_keys: Change = same,
    after_decay: Change = same,
    read: bool = False,
) -> Any:
    """Between the projections and the norm, with a place for something in between."""
    convolved = ops.causal_conv1d(x, weight, None, conv_state, activation="silu")
    split = after_conv(convolved).split([H * K, H * K, N * K], -1)
    q, k, v = (split[i].unflatten(-1, (-1, K)) for i in order)
    decay = after_decay(-a_log.float().exp() * F.softplus(a.float() + dt_bias))
    out = ops.gated_delta_rule(q, after_keys(k), v, decay, b.sigmoid(), delta_state, scale=0.25)
    return (out, convolved.abs()) if read else out


RANDOM = torch.Generator().manual_seed(0)
LAYER = (
    torch.randn(6, C, generator=RANDOM),
    torch.randn(C, 4, generator=RANDOM),
    *torch.randn(2, 6, N, generator=RANDOM),
    *torch.randn(2, N, generator=RANDOM),
    ops.conv_state(C, 4),
    ops.delta_state(N, K, K),
)


def test_convolution_gates_and_rule_become_one_op_in_the_runtime() -> None:
    report = explained(layer, *LAYER, paged=True, tolerance=1e-5)
    assert report.matches["conv_gated_delta_rule"] == report.matches["delta_gates"] == 1
    (site,) = [site for site in report.sites if site.rewrite == "conv_gated_delta_rule"]
    assert site.attrs == {"activation": "silu", "scale": 0.25, "rate_scale": 1.0}


def test_outside_of_the_runtime_they_are_three_ops() -> None:
    report = explained(layer, *LAYER, tolerance=1e-5)
    assert report.matches["conv_gated_delta_rule"] == 0 and report.matches["delta_gates"] == 1


@pytest.mark.parametrize(
    ("differs", "kind", "expected", "found"),
    [
        ({"order": (1, 0, 2)}, "operand order", "q: columns 0 to 16", "16 columns from 16 on"),
        ({"after_conv": torch.neg}, "other op", "q: columns 0 to 16", "neg"),
        ({"after_keys": lambda k: k * 2}, "other op", "k: columns 16 to 32", "mul"),
        ({"after_decay": lambda g: g * 2}, "other op", "g of delta_gates", "mul"),
        ({"read": True}, "extra user", "no other reader of causal_conv1d_update", "abs"),
    ],
    ids=["keys before queries", "negated", "keys doubled", "decay doubled", "read elsewhere"],
)
def test_what_is_between_them_keeps_them_apart(
    differs: dict[str, Any], kind: str, expected: str, found: str
) -> None:
    report = explained(partial(layer, **differs), *LAYER, paged=True, tolerance=1e-5)
    assert report.matches["conv_gated_delta_rule"] == 0
    (miss,) = report.misses("conv_gated_delta_rule")
    assert (miss.kind, expected in miss.expected, found in miss.found) == (kind, True, True), miss


def step(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    recurrent_state: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    state_slots: Tensor,
    other_slots: Tensor,
    *,
    differs: str = "",
) -> Tensor:
    """The three ops as they are in a program of the runtime."""
    sequences = query_start, seq_lens
    convolved = ops.causal_conv1d_update(
        x, weight, None, conv_state, *sequences, state_slots, activation="silu"
    )
    q, k, v = (
        columns.unflatten(-1, (-1, K)) for columns in convolved.split([H * K, H * K, N * K], -1)
    )
    g, beta = ops.delta_gates(a, b, a_log, dt_bias, 1.0)
    if differs == "gates":
        beta = ops.delta_gates(a, -b, a_log, dt_bias, 1.0)[1]
    slots = other_slots if differs == "slots" else state_slots
    out = ops.gated_delta_rule_update(
        q, k, v, g, beta, recurrent_state, *sequences, slots, scale=0.25
    )
    return out + conv_state.sum() if differs == "state" else out


def operands_of_step() -> list[Tensor]:
    a = in_steps(Draw(torch.float32), [(1, 5), (2, 3)], heads=(H, N), width=(K, K))
    names = "x weight conv_state a b A_log dt_bias recurrent_state query_start seq_lens state_slots"
    return [*(a[name] for name in names.split()), a["state_slots"].flip(0)]


@pytest.mark.parametrize(
    ("differs", "kind"),
    [("", ""), ("gates", "same value"), ("slots", "same value"), ("state", "extra user")],
)
def test_one_op_has_one_step_one_state_and_one_pair_of_gates(differs: str, kind: str) -> None:
    steps = [Pass("reinplace", reinplace), Pass(NAME, conv_gated_delta_rule, by_site=True)]
    traced = after_passes(steps, partial(step, differs=differs), *operands_of_step())
    assert traced.error < 1e-5
    assert traced.report.matches[NAME] == (not differs)
    assert [miss.kind for miss in traced.report.misses(NAME)] == [kind] * bool(differs)


def test_it_can_be_turned_off() -> None:
    report = explained(layer, *LAYER, paged=True, tolerance=1e-5, off=["conv_gated_delta_rule"])
    assert report.matches["conv_gated_delta_rule"] == 0 and report.matches["delta_gates"] == 1


@pytest.mark.parametrize("missing", [0, 1])
def test_only_the_last_program_that_reads_the_inputs_of_a_key_head_replaces_them(
    missing: int,
) -> None:
    """Six programs share the inputs of a key head. One that reads them after they were replaced has
    another result.

    missing  programs that have not read them when the launch ends, so that nobody may replace them
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert kernels.load("triton") is None
    draw = partial(in_steps, sequences=DECODE, heads=(1, 2), width=(16, 48))
    given, expected = (draw(Draw(torch.float32, device)) for _ in range(2))
    before = given["conv_state"].clone()
    truth = ops.conv_gated_delta_rule_update.reference(**expected)
    (arrived,) = conv_delta_rule.arrivals(given["seq_lens"], 1)
    arrived -= missing
    found = torch.empty_like(truth)
    tile = {"BLOCK_V": 16, "num_warps": 1}
    conv_delta_rule.launch_decode(**given, out=found, arrived=arrived, tile=tile)
    assert_close(found, truth, atol=1e-5, rtol=1e-4)
    assert_close(given["recurrent_state"], expected["recurrent_state"], atol=1e-5, rtol=1e-4)
    keys, values = given["conv_state"].split([2 * 16, 2 * 48], -1)
    replaced = expected["conv_state"].split([2 * 16, 2 * 48], -1)
    assert torch.equal(values, replaced[1])
    assert torch.equal(keys, before[..., : 2 * 16] if missing else replaced[0])
    # As the next layer needs it.
    assert torch.equal(arrived, torch.full_like(arrived, 5 if missing else 0))


def test_a_step_of_many_heads_runs_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert kernels.load("triton") is None
    monkeypatch.setattr(conv_delta_rule, "MOST_HEADS", 3)
    draw = partial(in_steps, sequences=DECODE, heads=(1, 2), width=(16, 48))
    given, expected = (draw(Draw(torch.float32, device)) for _ in range(2))
    truth = ops.conv_gated_delta_rule_update.reference(**expected)
    arrived = torch.ones(1)  # is not read
    found = conv_delta_rule.conv_gated_delta_rule_update(**given, shared=(arrived,))
    assert_close(found, truth, atol=1e-5, rtol=1e-4)
    for state in ("recurrent_state", "conv_state"):
        assert_close(given[state], expected[state], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"A_log": (1,), "dt_bias": (1,)}, "A_log is [1] and a [5, 4]: expected a number of each head"),
        ({"dt_bias": (1,)}, "dt_bias is [1] and a [5, 4]: expected a number of each head"),
        ({"a": (4,), "b": (4,)}, "A_log is [4] and a [4]: expected a number of each head, and rows"),
        ({"b": (5, 1)}, "b is [5, 1], expected [5, 4]"),
    ],
)  # fmt: skip
def test_the_kernel_of_gates_refuses_what_the_reference_would_broadcast(
    other: dict[str, tuple[int, ...]], sentence: str
) -> None:
    assert kernels.load("triton") is None
    shapes = {"a": (5, 4), "b": (5, 4), "A_log": (4,), "dt_bias": (4,)} | other
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    kernel = next(kernel for kernel in ops.delta_gates.kernels if kernel.provider == "triton")
    refused = refusal_text(kernel, Platform.named("h200"), given | {"rate_scale": 1.0})
    assert refused is not None and sentence in refused
