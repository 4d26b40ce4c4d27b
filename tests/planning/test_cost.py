"""Bytes and flops of graphs: held against sums of tensor sizes made by hand."""

import pytest
import sympy
import torch
from rewriting import TIDY, after_passes
from torch import Tensor

from atomc import ops
from atomc.compiler import pipeline
from atomc.cost import cost
from atomc.cost.efficiency import evaluated
from atomc.graph.step_symbols import C, R, S, T
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.program import compile_model
from atomc.rewriting.graph_pass import Pass


def costs(function, *inputs, dynamic=False):
    """The costs of function(*inputs), traced and tidied."""
    found = []

    def look(gm, context):
        found.extend(cost.graph_costs(gm))
        return []

    after_passes([TIDY, Pass("look", look)], function, *inputs, dynamic=dynamic)
    return found


def only(found):
    assert len(found) == 1, [entry.op for entry in found]
    return found[0]


def at(formula, **sizes):
    return evaluated(str(formula), tuple(sizes.items()))


def test_a_linear_reads_input_weight_and_bias_once_and_writes_its_output():
    x, w, b = torch.randn(5, 24), torch.randn(40, 24), torch.randn(40)
    found = only(costs(lambda x, w, b: ops.linear(x, w, b), x, w, b))
    assert found.op == "linear"
    assert found.cost.bytes == 4 * (5 * 24 + 40 * 24 + 40 + 5 * 40)
    assert found.cost.flops == 2 * 5 * 24 * 40


@pytest.mark.parametrize(
    ("product", "shapes", "flops"),
    [
        (torch.baddbmm, [(3, 5, 40), (3, 5, 24), (3, 24, 40)], 2 * 3 * 5 * 24 * 40),
        (torch.addmm, [(5, 40), (5, 24), (24, 40)], 2 * 5 * 24 * 40),
        (torch.bmm, [(3, 5, 24), (3, 24, 40)], 2 * 3 * 5 * 24 * 40),
    ],
)
def test_a_product_sums_over_the_columns_of_its_first_matrix_whatever_is_added(
    product, shapes, flops
):
    found = only(costs(product, *(torch.randn(shape) for shape in shapes)))
    assert found.cost.flops == flops


def test_a_fused_norm_reads_two_rows_and_writes_two():
    x, r, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    found = only(costs(lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-5), x, r, w))
    assert found.cost.bytes == 4 * (4 * 3 * 8 + 8)


def test_a_product_of_codes_reads_codes_and_scales_and_sums_over_its_inputs():
    x, w = torch.zeros(5, 64, dtype=torch.int8), torch.zeros(40, 64, dtype=torch.int8)
    by_row, by_output = torch.ones(5, 1), torch.ones(40, 1)
    found = only(
        costs(
            lambda *given: ops.scaled_linear_int8(*given, out_dtype=torch.bfloat16),
            x,
            w,
            by_row,
            by_output,
        )
    )
    assert found.cost.bytes == 5 * 64 + 40 * 64 + 4 * (5 + 40) + 2 * 5 * 40
    assert found.cost.flops == 2 * 5 * 64 * 40


@pytest.mark.parametrize("few", [True, False], ids=["of two activations a byte", "of 16 bits"])
def test_a_product_of_mxfp4_sums_over_all_that_its_bytes_hold(few):
    w, scales = torch.zeros(40, 32, dtype=torch.uint8), torch.zeros(40, 2, dtype=torch.uint8)
    x = torch.zeros(5, 32, dtype=torch.uint8) if few else torch.randn(5, 64).bfloat16()
    given = (x, w, scales, torch.zeros(5, 2, dtype=torch.uint8)) if few else (x, w, scales)
    found = only(costs(lambda *given: ops.linear_mxfp4(*given, out_dtype=torch.bfloat16), *given))
    assert found.cost.flops == 2 * 5 * 64 * 40
    assert found.cost.bytes == sum(t.nbytes for t in given) + 2 * 5 * 40


def test_an_embedding_reads_only_the_rows_that_it_returns():
    ids, table = torch.zeros(6, dtype=torch.int64), torch.randn(1000, 16)
    found = only(costs(lambda ids, table: ops.embedding(ids, table), ids, table))
    assert found.cost.bytes == 6 * 8 + 2 * 6 * 16 * 4


def test_causal_attention_counts_the_pairs_that_see_each_other():
    q, k, v = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    found = only(costs(lambda q, k, v: ops.attention(q, k, v, scale=0.25), q, k, v))
    pairs = 7 * 8 // 2
    assert found.cost.flops == 2 * pairs * 4 * (16 + 16)
    assert found.cost.bytes == 4 * (2 * 7 * 4 * 16 + 2 * 7 * 2 * 16)


def test_attention_within_packed_sequences_counts_pairs_of_equal_sequences():
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    starts = torch.tensor([0, 2, 8, 12], dtype=torch.int32)
    found = only(
        costs(lambda q, k, v, at: ops.varlen_attention(q, k, v, at, scale=0.25), q, k, v, starts)
    )
    assert found.cost.flops == 2 * (12 * 12 // 3) * 4 * (16 + 16)
    assert found.cost.bytes == 4 * (2 * 12 * 4 * 16 + 2 * 12 * 2 * 16)


def test_views_cost_nothing_and_an_expanded_operand_is_read_as_it_lies():
    x, w = torch.randn(1, 8), torch.randn(4, 8)
    found = only(costs(lambda x, w: x.expand(4, 8).transpose(0, 1) * w.transpose(0, 1), x, w))
    assert found.cost.bytes == 4 * (8 + 32 + 32)


def test_pointwise_nodes_that_meet_are_one_kernel():
    x, y = torch.randn(6, 8), torch.randn(6, 8)

    def chain(x, y):
        a = torch.sin(x) * y
        return torch.cos(a) + y

    found = only(costs(chain, x, y))
    assert found.op == "glue"
    assert found.cost.bytes == 4 * 3 * 48  # x, y and the result: a stays in registers
    assert found.cost.flops == 4 * 48


def test_a_kernel_between_keeps_pointwise_nodes_apart():
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    found = costs(lambda x, w: torch.sin(ops.linear(torch.cos(x), w)) + torch.cos(x), x, w)
    assert [entry.op for entry in found] == ["cos", "linear", "glue"]
    assert found[2].cost.bytes == 4 * 3 * 48  # the product, the cosine, the sum


def test_two_branches_that_join_are_one_kernel():
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    found = only(costs(lambda x, y: torch.sin(x) * torch.cos(y), x, y))
    assert found.cost.bytes == 4 * 3 * 48


def test_a_half_of_a_tensor_is_read_as_a_half():
    x = torch.randn(6, 8)
    found = only(costs(lambda x: torch.sin(x[:, :4]), x))
    assert found.cost.bytes == 4 * 2 * 24


def test_symbolic_sizes_stay_formulas():
    x, w = torch.randn(5, 24), torch.randn(40, 24)
    found = only(costs(lambda x, w: ops.linear(x, w), x, w, dynamic=True))
    assert len(found.cost.flops.free_symbols) == 3
    with pytest.raises(ValueError, match=r"the graph has sizes .* that a step does not define"):
        at(found.cost.bytes, T=3)


def program_costs(monkeypatch, layers, window=None):
    """The costs of a small Llama compiled for the runtime, in T, R, S and C."""
    found = []
    run = pipeline.run

    def watched(gm, passes, context, report):
        done = run(gm, passes, context, report)
        if context.choose is None and context.paged and len(passes) > 1:
            found.append(cost.graph_costs(gm))
        return done

    monkeypatch.setattr(pipeline, "run", watched)
    kind = "mistral" if window else "llama"
    config = {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **({"sliding_window": window} if window else {}),
    }
    compile_model(
        ready(create_model(config, dtype=torch.bfloat16, device="meta")),
        options={"glue": "eager", "strict": True},
    )
    return only(found)


def test_a_step_of_the_runtime_is_a_formula_of_its_tokens_rows_sequences_and_context(monkeypatch):
    found = program_costs(monkeypatch, layers=2)
    whole = sympy.Add(*[entry.cost.bytes for entry in found])
    assert whole.free_symbols == {T, R, S, C}
    weights = (
        2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32) + 96 * 32 + 5 * 32
    )  # two layers, head, norms
    constants = whole.subs({T: 0, R: 0, S: 0})
    assert 2 * weights <= constants <= 2 * weights + 64  # and the rotary frequencies
    kv_per_token = 2 * 2 * 2 * 8 * 2  # layers, k and v, heads, width, bytes
    assert whole.coeff(C * S) == kv_per_token


def test_decode_attends_to_its_context_and_a_prompt_to_half_of_it(monkeypatch):
    attention = next(
        entry.cost
        for entry in program_costs(monkeypatch, layers=1)
        if entry.op == "paged_attention"
    )
    assert at(attention.flops, T=3, S=3, C=50) == 2 * 3 * 50 * 4 * 16
    assert at(attention.flops, T=50, S=1, C=50) == 2 * (50 * 51 / 2) * 4 * 16


def test_a_window_bounds_what_is_read(monkeypatch):
    found = program_costs(monkeypatch, layers=1, window=8)
    attention = next(entry.cost for entry in found if entry.op == "paged_attention")
    assert at(attention.bytes, T=1, S=1, C=50) < at(attention.bytes, T=1, S=1, C=8) * 1.2
    assert at(attention.flops, T=1, S=1, C=50) == 2 * 8 * 4 * 16


def test_a_cache_write_moves_its_rows_and_not_the_cache(monkeypatch):
    write = next(
        entry.cost for entry in program_costs(monkeypatch, layers=1) if entry.op == "rope_kv_write"
    )
    assert write.bytes.free_symbols == {T}


def test_unknown_shapes_keep_their_symbols():
    def rows(x: Tensor) -> Tensor:
        return torch.sin(x)

    found = only(costs(rows, torch.randn(4, 6), dynamic=True))
    assert isinstance(found.cost.bytes, sympy.Expr) and found.cost.bytes.free_symbols
