"""The gated delta rule and its convolution: the ops as transformers computes them, in one piece and
in steps.
"""

import pytest
import torch
from kernel_cases.conv import of_sequences
from kernel_cases.delta_rule import ruled
from kernel_cases.draw import Draw
from torch.testing import assert_close

from atomc import ops
from atomc.ops.state import StateSpec, rows_of

qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


def by_transformers(rule, given, state=None):
    """Its result and the state after it, of one sequence."""
    q, k, v, g, beta = (given[name][None] for name in ("q", "k", "v", "g", "beta"))
    out, after = rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=None if state is None else state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], after[0]


RULES = (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule)


@pytest.mark.parametrize("rule", RULES, ids=["chunks", "recurrent"])
@pytest.mark.parametrize("heads", [(2, 4), (3, 3)])
def test_the_rule_is_that_of_transformers(rule, heads):
    given = ruled(Draw(torch.float32), tokens=70, heads=heads)
    expected, _ = by_transformers(rule, given)
    assert_close(ops.gated_delta_rule(**given), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=["chunks", "recurrent"])
def test_the_state_after_a_step_is_that_of_transformers(rule):
    draw = Draw(torch.float32)
    given = ruled(draw, tokens=67)
    state = draw.normal(4, 4, 16, 32)
    before = state.clone()
    step = of_sequences(draw, [(65, 70), (2, 2)])
    out = ops.gated_delta_rule_update(
        **{name: given[name] for name in ("q", "k", "v", "g", "beta", "scale")},
        recurrent_state=state,
        **step,
    )
    first, second = step["state_slots"].tolist()
    parts = {name: x.split([65, 2]) for name, x in given.items() if name != "scale"}
    for s, (slot, old) in enumerate(((first, before[first]), (second, None))):
        own = {name: part[s] for name, part in parts.items()}
        expected, after = by_transformers(rule, own, old)
        assert_close(out.split([65, 2])[s], expected, atol=1e-5, rtol=1e-4)
        assert_close(state[slot], after, atol=1e-5, rtol=1e-4)
    others = [slot for slot in range(4) if slot not in (first, second)]
    assert torch.equal(state[others], before[others])


@pytest.mark.parametrize("bias", [False, True])
def test_the_convolution_is_that_of_transformers(bias):
    draw = Draw(torch.float32)
    x, weight = draw.normal(9, 6), draw.normal(6, 4)
    b = draw.normal(6) if bias else None
    expected = qwen.causal_conv1d_fn(x.T[None], weight, b, activation="silu")[0].T
    assert_close(ops.causal_conv1d(x, weight, b, activation="silu"), expected)
    # In steps of 5, 1 and 3 tokens, as its cache has it.
    state, kept, parts = torch.zeros(1, 3, 6), torch.zeros(1, 6, 3), []
    for start, end in ((0, 5), (5, 6), (6, 9)):
        step = of_sequences(draw, [(end - start, end)]) | {"state_slots": torch.tensor([0])}
        parts.append(
            ops.causal_conv1d_update(x[start:end], weight, b, state, **step, activation="silu")
        )
        qwen.causal_conv1d_update(x[start:end].T[None], kept, weight, b, "silu")
        assert torch.equal(state[0], kept[0].T)
    assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (3, 37), (1, 20, 19)], ids=str)
def test_steps_of_any_size_have_the_result_of_the_whole_sequence(sizes):
    draw = Draw(torch.float32)
    given = ruled(draw, tokens=40)
    x, weight = draw.normal(40, 6), draw.normal(6, 3)
    states = torch.randn(2, 4, 16, 32), torch.randn(2, 2, 6)
    found, length = [], 0
    for size in sizes:
        own, length = slice(length, length + size), length + size
        step = of_sequences(draw, [(size, length)]) | {"state_slots": torch.tensor([1])}
        rows = {name: t[own] if isinstance(t, torch.Tensor) else t for name, t in given.items()}
        found.append(
            (
                ops.gated_delta_rule_update(**rows, recurrent_state=states[0], **step),
                ops.causal_conv1d_update(
                    x[own], weight, None, states[1], **step, activation="none"
                ),
            )
        )
    whole = ops.gated_delta_rule(**given), ops.causal_conv1d(x, weight, activation="none")
    for part, expected in zip(zip(*found, strict=True), whole, strict=True):
        assert_close(torch.cat(part), expected, atol=1e-5, rtol=1e-4)


def test_a_state_is_described_by_the_call():
    given = ruled(Draw(torch.bfloat16)) | {"state": ops.delta_state(4, 16, 32)}
    assert ops.gated_delta_rule.state.spec("net", given, torch.float8_e4m3fn) == StateSpec.of(
        "net", "recurrent", [(4, 16, 32)], torch.float32
    )
    given = {"x": torch.zeros(9, 6, dtype=torch.bfloat16), "weight": torch.zeros(6, 4)}
    spec = ops.causal_conv1d.state.spec("net", given, torch.float8_e4m3fn)
    assert spec == StateSpec.of("net", "conv", [(3, 6)], torch.bfloat16)
    assert spec.bytes_per_sequence() == 36 and ops.conv_state(6, 4).shape == (0, 3, 6)
    with pytest.raises(ValueError, match="kernel_size is 1, expected at least 2"):
        ops.conv_state(6, 1)
    with pytest.raises(ValueError, match="keeps no inputs; leave out its handle"):
        ops.causal_conv1d.state.spec("net", given | {"weight": torch.zeros(6, 1)}, None)


def test_an_unknown_activation_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"'gelu' is not one of \('silu', 'none'\)"):
        ops.causal_conv1d(torch.zeros(3, 2), torch.zeros(2, 2), activation="gelu")


def test_rows_of_padding_have_no_sequence():
    row, owner, real = rows_of(torch.tensor([0, 2, 2, 3], dtype=torch.int32), 5)
    assert row.tolist() == [0, 1, 2, 3, 4] and owner.tolist() == [0, 0, 2, 2, 2]
    assert real.tolist() == [True, True, True, False, False]
