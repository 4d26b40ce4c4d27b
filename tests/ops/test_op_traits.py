"""An op says what the compiler must know of it: one defined here is costed, merged and planned like
ours, by no table.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rewriting import TIDY, after_passes
from test_imports import PACKAGE, sources
from torch import Tensor, nn

import atomc
from atomc import ops
from atomc.compiler import ranges
from atomc.cost import cost
from atomc.cost.efficiency import LAUNCH
from atomc.cost.quantized_weights import quantized_weights
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.ops import REGISTRY, Tokens
from atomc.ops.op import PreferInductor, op
from atomc.ops.op_cost import product
from atomc.ops.op_traits import Kind, QuantizedWeight
from atomc.planning.device_model import Model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import compile_for, plan_step
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Pass

H200 = Platform.named("h200")
WIDTH, INNER, LAYERS = 64, 96, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
PROJECTED = QuantizedWeight(
    "int8",
    lambda given: f"a scale for {given['span']} outputs",
    codes=1,
    rate=2,
    stored=("codes", "weight_scale"),
)


def project_cost(call):
    moved = sum(operand.bytes for operand in (*call.reads, *call.results))
    return moved, 2 * call["tokens"].numel * call["codes"].shape[0]


def project(
    bias: Tensor | None, codes: Tensor, weight_scale: Tensor, tokens: Tensor, *, span: int = 1
) -> Tensor:
    """tokens [..., K] by codes [N, K] int8 with a scale per output -> [..., N]. Its rows are no
    first argument.
    """
    total = tokens.float() @ codes.float().T * weight_scale.flatten()
    return (total if bias is None else total + bias).to(tokens.dtype)


def clip_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate.clamp(0, 1) * up


def turned(x: Tensor) -> Tensor:
    return x.flip(-1).contiguous()


def own_project(bias, codes, weight_scale, tokens, *, span=1):
    return project(bias, codes, weight_scale, tokens, span=span)


def own_project_of_few(bias, codes, weight_scale, tokens, *, span=1):
    return project(bias, codes, weight_scale, tokens, span=span)


@pytest.fixture(scope="module")
def added():
    """Three ops of names that nobody knows: a quantized linear with kernels of its own, a gated
    activation, another.
    """
    known = set(REGISTRY)
    traits = {
        "kind": Kind.LINEAR,
        "rows": "tokens",
        "cost": project_cost,
        "quantized_weight": PROJECTED,
    }
    made = [
        op(**traits)(project),
        op(kind=Kind.GATE, rows=None)(clip_and_mul),
        op(kind=Kind.OTHER, rows=None)(turned),
    ]
    made[0].kernel("mine", tokens=Tokens(1, 4))(own_project_of_few)
    made[0].kernel("mine")(own_project)
    yield made
    for name in set(REGISTRY) - known:  # other tests run over all that there are
        del REGISTRY[name]


class Projected(nn.Module):
    def __init__(self, added, inputs, outputs, dtype=torch.float32):
        super().__init__()
        self.op = added[0]
        self.codes = nn.Parameter(
            torch.zeros(outputs, inputs, dtype=torch.int8), requires_grad=False
        )
        self.weight_scale = nn.Parameter(torch.ones(outputs, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(None, self.codes, self.weight_scale, x, span=1)


@pytest.fixture(scope="module")
def model(added):
    """A Llama on meta whose down projections are the new op."""
    module = create_model(CONFIG, dtype=torch.bfloat16, device="meta")
    for layer in module.model.layers:
        layer.mlp.down_proj = Projected(added, INNER, WIDTH).to("meta")
    return Model(ready(module), CONFIG, None, torch.bfloat16, None, 0)


@pytest.fixture(scope="module")
def program(model):
    return compile_for(model, H200)


def looked_at(look, function, *inputs, dynamic=False):
    found = []
    after_passes(
        [TIDY, Pass("look", lambda gm, context: found.append(look(gm)) or [])],
        function,
        *inputs,
        dynamic=dynamic,
    )
    return found[-1]


def test_a_new_op_costs_what_it_says_and_one_that_says_nothing_reads_and_writes(added):
    x, codes, scale = torch.randn(5, 24), torch.zeros(40, 24, dtype=torch.int8), torch.ones(40, 1)
    (found,) = looked_at(
        cost.graph_costs, lambda x, *weight: added[0](None, *weight, x), x, codes, scale
    )
    assert found.op == "project" and found.cost.flops == 2 * 5 * 24 * 40
    assert found.cost.bytes == x.nbytes + codes.nbytes + scale.nbytes + 4 * 5 * 40
    (found,) = looked_at(cost.graph_costs, lambda x: added[2](x), x)
    assert (found.op, found.cost.bytes, found.cost.flops) == ("turned", 2 * x.nbytes, x.numel())


def test_the_rows_of_a_new_op_are_the_tokens_wherever_the_argument_stands(added):
    x, codes, scale = torch.randn(5, 24), torch.zeros(40, 24, dtype=torch.int8), torch.ones(40, 1)
    assert (
        looked_at(
            ranges.token_expression, lambda x, *weight: added[0](None, *weight, x), x, codes, scale
        )
        == 5
    )
    assert looked_at(ranges.token_expression, lambda x: added[2](x), x) is None


def test_a_graph_is_lowered_for_each_range_that_kernels_of_a_new_op_tell_apart(program):
    chosen = {
        (choice.tokens, choice.chosen)
        for choice in program.report.kernels
        if choice.op == "project"
    }
    assert {("1 to 4", "mine"), ("17 and more", "mine")} <= chosen  # those of linear end at 16
    assert {tokens for tokens, _ in chosen} == {choice.tokens for choice in program.report.kernels}


def test_the_weights_of_a_new_op_are_listed_with_what_they_save(program):
    assert [(found.op, found.scheme, found.layer) for found in program.report.few_bits] == [
        ("project", "int8, a scale for 1 outputs", layer) for layer in range(LAYERS)
    ]
    assert {found.bytes for found in program.report.few_bits} == {INNER * WIDTH + 4 * WIDTH}
    assert {found.full_bytes for found in program.report.few_bits} == {2 * INNER * WIDTH}


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("fp8", "fp8, one scale per output"),
        ("fp8_block", "fp8, one scale per square of 128"),
        ("mxfp4", "mxfp4, one scale per 32 inputs"),
    ],
)
def test_the_weight_of_an_op_whose_scheme_is_an_argument_is_listed_as_that_scheme_stores_it(
    scheme, said
):
    codes = torch.uint8 if scheme == "mxfp4" else torch.float8_e4m3fn
    x, weight = torch.ones(3, 64).to(codes), torch.ones(256, 64).to(codes)
    scales = {
        "fp8": ((3, 1), (256, 1)),
        "fp8_block": ((3, 1), (2, 1)),
        "mxfp4": ((3, 4), (256, 4)),
    }[scheme]
    x_scale, weight_scale = (
        torch.ones(shape).to(torch.uint8 if scheme == "mxfp4" else torch.float32)
        for shape in scales
    )

    def keys_and_values(*given):
        return ops.linear_split_cat(*given, nope=64, scheme=scheme, out_dtype=torch.bfloat16)

    rotated = torch.ones(3, 2, 16, dtype=torch.bfloat16)
    (found,) = looked_at(
        quantized_weights, keys_and_values, x, weight, x_scale, weight_scale, rotated
    )
    assert (found.op, found.scheme) == ("linear_split_cat", said)
    assert found.bytes == weight.nbytes + weight_scale.nbytes
    assert found.full_bytes == 2 * weight.numel() * (2 if scheme == "mxfp4" else 1)


def test_a_new_linear_is_no_neighbour_to_fuse_and_another_op_is(added, tmp_path):
    x, norm = torch.randn(5, WIDTH), torch.randn(WIDTH)
    codes, scale = torch.zeros(WIDTH, WIDTH, dtype=torch.int8), torch.ones(WIDTH, 1)

    def step(x, norm, codes, scale):
        return added[2](added[0](None, codes, scale, added[2](ops.rms_norm(x, norm, 1e-6))))

    options = {"report": str(tmp_path / "report.html"), "cache": False}
    report = atomc.explain(step, x, norm, codes, scale, options=options)
    neighbours = [
        (found.what, found.bytes) for found in report.savings if found.kind == "neighbours"
    ]
    assert neighbours == [("rms_norm > turned", str(2 * x.nbytes))]


def test_a_new_op_is_planned_with_its_kernel_its_cost_and_its_rate(model, program):
    tokens = 4096
    (line,) = (
        line
        for line in plan_step(model, H200, Workload(tokens, 8, 1024), program=program).lines
        if line.op == "project"
    )
    assert (line.kernel, line.calls, line.module_path) == (
        "mine",
        LAYERS,
        "model.layers.*.mlp.down_proj",
    )
    assert line.flops == 2 * tokens * INNER * WIDTH
    assert line.bytes == 2 * tokens * (INNER + WIDTH) + INNER * WIDTH + 4 * WIDTH
    slow = replace(Platform.named("sm100"), flops=1e9)  # no kernel was measured there
    (line,) = (
        line
        for line in plan_step(model, slow, Workload(tokens, 8, 1024), program=program).lines
        if line.op == "project"
    )
    assert line.least == pytest.approx(line.flops / 2e9) and line.seconds == pytest.approx(
        LAUNCH + line.least
    )


def test_linears_before_a_new_gated_activation_are_merged_as_its_gate_and_what_it_gates(added):
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.gate_proj = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)

        def forward(self, x):
            up = self.up_proj(x)
            return added[1](self.gate_proj(x), up)

    report = atomc.explain(
        Mlp().requires_grad_(False), torch.randn(3, WIDTH), options={"cache": False}
    )
    assert report.matches["merge_gate_up"] == 1 and report.matches["merge_linears"] == 0


def test_a_kernel_of_a_new_linear_is_refused_where_a_row_may_not_depend_on_others(added):
    x, codes, scale = torch.randn(5, 24), torch.zeros(40, 24, dtype=torch.int8), torch.ones(40, 1)
    with pytest.raises(Exception, match="no such kernel serves project"):
        atomc.explain(
            lambda x, *weight: added[0](None, *weight, x),
            x,
            codes,
            scale,
            options={"batch_invariant": True, "strict": True, "cache": False},
        )


@pytest.mark.parametrize(
    ("when", "options", "chosen"),
    [
        (PreferInductor.NEVER, {}, "mine"),
        (PreferInductor.ALWAYS, {}, "inline"),
        (PreferInductor.ALWAYS, {"glue": "eager"}, "mine"),
        (PreferInductor.FREE_ROUNDING, {}, "inline"),
        (PreferInductor.FREE_ROUNDING, {"rounding": "hf"}, "mine"),
        (PreferInductor.MAX_AUTOTUNE, {}, "mine"),
        (PreferInductor.MAX_AUTOTUNE, {"mode": "max-autotune"}, "inline"),
    ],
)
def test_a_kernel_says_when_inductor_is_preferred_to_it(added, when, options, chosen):
    added[2].kernel("mine", prefer_inductor=when)(turned)
    try:
        options = {"glue": "inductor", **options, "cache": False}
        report = atomc.explain(lambda x: added[2](x), torch.randn(3, 8), options=options)
    finally:
        added[2].kernels.clear()
    assert [choice.chosen for choice in report.kernels] == [chosen]


# What is forgotten


def quantized(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    return x @ weight.T


@pytest.mark.parametrize(
    ("traits", "said"),
    [
        (
            {"kind": Kind.LINEAR, "rows": "x", "quantized_weight": PROJECTED},
            r"no parameter \['codes'\], it has \['x'",
        ),
        (
            {"kind": Kind.OTHER, "rows": "tokens"},
            r"no parameter \['tokens'\], it has \['x', 'weight', 'weight_scale'\]",
        ),
        (
            {"kind": Kind.LINEAR | Kind.NORM, "rows": "x"},
            r"give its cost=, which has no default for .*LINEAR",
        ),
        ({"kind": Kind.ATTENTION, "rows": None}, "give its cost="),
        ({"kind": Kind.LINEAR, "rows": "x", "cost": product}, "say how its weight is stored"),
    ],
)
def test_an_op_that_leaves_out_what_its_kind_needs_is_refused(traits, said):
    with pytest.raises(ValueError, match=f"op quantized: .*{said}"):
        op(**traits)(quantized)
    assert "quantized" not in REGISTRY


def test_kind_and_rows_have_no_default():
    with pytest.raises(TypeError, match="'kind' and 'rows'"):
        op()(turned)


# No table

# Where ops are defined, run, and joined by name.
NAMED = ("ops", "kernels", "passes")
# A name that is also another's.
ALSO = {
    ("models/deepseek_v32.py", "index_topk"): "a field of a config.json",
    ("stock/indexer.py", "index_topk"): "the same field",
    ("models/rotary.py", "linear"): "a scaling of rotary positions in a config.json",
    ("parallel/shard_plan.py", "all_reduce"): "a word of transformers' plans",
    ("planning/stages.py", "embedding"): "what the first stage of a pipeline has, in a table",
    ("runtime/server/openai/embeddings.py", "embedding"): "a field of OpenAI's API",
    ("runtime/server/service/response_types.py", "embedding"): "a field of OpenAI's API",
    ("vllm_plugin.py", "rms_norm"): "an op of vLLM",
}


def names_ops(text: str) -> list[str]:
    """Strings in a source that are the name of an op, or that are looked for in one."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.removeprefix("atom::")
            found += [name] if name in REGISTRY else []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            whole = ast.unparse(node.comparators[0])
            part = str(getattr(node.left, "value", ""))
            if part.isidentifier() and re.search(r"\bop(\.name|_name)?$", whole):
                found.append(ast.unparse(node))
    return found


def test_no_module_but_those_of_ops_kernels_and_rewrites_names_an_op():
    found = {
        (str(path), name)
        for path in sources()
        if path.parts[0] not in NAMED
        for name in names_ops((PACKAGE / path).read_text())
    }
    assert found == set(ALSO)


@pytest.mark.parametrize(
    "text",
    [
        'TABLE = {"rms_norm": 2}',
        'x = node.op == "atom::linear"',
        'ok = "norm" in kernel.op',
        'ok = "norm" in op.name',
        'op in ("linear", "mm")',
    ],
)
def test_a_table_of_ops_is_found(text):
    assert names_ops(text)


def test_the_docs_list_every_trait():
    text = (Path(__file__).parents[2] / "docs/add-op.md").read_text()
    absent = [
        name
        for name in ("kind", "rows", "cost", "quantized_weight", "rounds_once")
        if f"`{name}`" not in text
    ]
    assert absent == []
