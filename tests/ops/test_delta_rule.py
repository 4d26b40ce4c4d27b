"""The gated delta rule and its convolution: the ops as transformers computes them, in one piece and
in steps; and in a model, through compiler and runtime.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases.conv import of_sequences
from kernel_cases.delta_rule import ruled
from kernel_cases.draw import Draw
from torch import nn
from torch.testing import assert_close

import atomc
from atomc import ops
from atomc.ops.state import StateSpec, rows_of
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.requests.sampling_params import SamplingParams

qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


def by_transformers(rule, given, state=None):
    """Its result and the state after it, of one sequence."""
    q, k, v, g, beta = (given[name][None] for name in ("q", "k", "v", "g", "beta"))
    groups = v.shape[2] // q.shape[2]  # transformers 5.17 has its layer repeat the heads
    out, after = rule(
        q.repeat_interleave(groups, 2),
        k.repeat_interleave(groups, 2),
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
    state = draw.normal(4, 2, 16, 32)
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
    states = torch.randn(2, 2, 16, 32), torch.randn(2, 2, 6)
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
    given = ruled(Draw(torch.bfloat16)) | {"state": ops.delta_state(2, 16, 32)}
    assert ops.gated_delta_rule.state.spec("net", given, torch.float8_e4m3fn) == StateSpec.of(
        "net", "recurrent", [(2, 16, 32)], torch.float32
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


# ---- through compiler and runtime


class DeltaNet(nn.Module):
    """Two key heads of 8, four value heads of 16, and a convolution over three tokens before
    them.
    """

    def __init__(self):
        super().__init__()
        self.qkv, self.ba = nn.Linear(16, 96, bias=False), nn.Linear(16, 8, bias=False)
        self.taps, self.out = nn.Parameter(torch.empty(96, 3)), nn.Linear(64, 16, bias=False)
        self.conv_state, self.delta_state = ops.conv_state(96, 3), ops.delta_state(4, 8, 16)

    def forward(self, x):
        mixed = ops.causal_conv1d(self.qkv(x), self.taps, None, self.conv_state, activation="silu")
        q, k, v = (
            part.unflatten(-1, (-1, w))
            for part, w in zip(mixed.split([16, 16, 64], -1), (8, 8, 16), strict=True)
        )
        b, a = self.ba(x).chunk(2, -1)
        g = -F.softplus(a.float())
        out = ops.gated_delta_rule(q, k, v, g, b.sigmoid(), self.delta_state, scale=8**-0.5)
        return self.out(out.flatten(-2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(61, 16), nn.Linear(16, 61, bias=False)
        self.layers = nn.ModuleList(DeltaNet() for _ in range(2))

    def forward(self, input_ids, positions, logits_rows=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x if logits_rows is None else x.index_select(0, logits_rows))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = Model().eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.4)
    return made


@pytest.mark.parametrize("chunk", [4, 70])
def test_a_model_is_served_in_chunks_as_the_whole_sequence_is_computed(model, chunk):
    config = EngineConfig(
        max_model_len=160,
        max_num_seqs=3,
        max_num_batched_tokens=chunk,
        seed=0,
        options={"strict": True, "glue": "eager"},
    )
    engine = Engine(config, module=model, progress=False)
    assert [(spec.kind, spec.bytes_per_sequence()) for spec in engine.program.specs] == [
        ("conv", 2 * 96 * 4),
        ("recurrent", 4 * 8 * 16 * 4),
    ] * 2
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(61, (n,), generator=generator).tolist() for n in (1, 130, 5, 66)]
    for i, prompt in enumerate(prompts):
        engine.add(engine.request(str(i), prompt, SamplingParams(max_tokens=6, ignore_eos=True)))
    found = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        engine.check()
    for i, prompt in enumerate(prompts):
        tokens = found[str(i)]
        ids = torch.tensor([*prompt, *tokens])
        logits = model(ids, torch.arange(len(ids)))[len(prompt) - 1 : -1]
        assert len(tokens) == 6 and logits.argmax(-1).tolist() == tokens


def test_a_compiled_model_has_one_graph_for_all_lengths_and_reports_both_ops(model):
    options = {"strict": True, "glue": "eager"}
    compiled = torch.compile(model, backend="atom", dynamic=True, fullgraph=True, options=options)
    torch.compiler.reset()
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for length in (12, 70, 200):
            ids = torch.arange(length) % 61
            assert_close(
                compiled(ids, torch.arange(length)),
                model(ids, torch.arange(length)),
                atol=1e-4,
                rtol=1e-4,
            )
    matches = atomc.reports()[-1].matches
    assert matches["causal_conv1d"] == matches["gated_delta_rule"] == 2
