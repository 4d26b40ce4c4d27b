"""Kernels for Options(batch_invariant=True): a row's result is the same bits whatever the other
rows are.
"""

import pytest
import torch

import atomc
from atomc import ops
from atomc.errors import OptionsError
from atomc.kernels import INVARIANT, load
from atomc.models import build
from atomc.models.loader import ready
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import compile_model

assert load(INVARIANT) is None
# The Triton kernels run in its interpreter where there is no GPU.
DEVICES = {"triton": "cuda" if torch.cuda.is_available() else "cpu", "cpu": "cpu"}
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def invariant(op, kind):
    (kernel,) = (
        kernel
        for kernel in op.kernels
        if kernel.provider == INVARIANT
        and kernel.function.__module__.endswith("on_cpu") == (kind == "cpu")
    )
    return kernel.function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", DEVICES)
def test_a_row_of_a_linear_layer_does_not_know_the_others(kind, dtype):
    torch.manual_seed(0)
    x, weight, given = (
        torch.randn(shape, dtype=dtype, device=DEVICES[kind])
        for shape in ((70, 48), (40, 48), (40,))
    )
    linear = invariant(ops.linear, kind)
    for bias in (given, None):
        whole = linear(x, weight, bias)
        atol = 1e-5 if dtype == torch.float32 else 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            whole, ops.linear.reference(x, weight, bias), atol=atol, rtol=1e-3
        )
        for rows in (slice(0, 1), slice(3, 20), slice(69, 70), slice(0, 0)):
            assert torch.equal(linear(x[rows], weight, bias), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (768, 256), (3072, 256), (40, 48), (1000, 130)])
def test_a_row_of_a_product_on_a_cpu_is_the_same_bits_wherever_it_lies(n, k, dtype):
    torch.manual_seed(0)
    linear, row, weight = (
        invariant(ops.linear, "cpu"),
        torch.randn(k, dtype=dtype),
        torch.randn(n, k, dtype=dtype),
    )
    found = set()
    for place in range(12):
        x = torch.randn(12, k, dtype=dtype)
        x[place] = row
        found.add(tuple(linear(x, weight)[place].tolist()))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("kind", "more"),
    [("triton", {}), ("cpu", {}), ("cpu", {"window": 7}), ("cpu", {"softcap": 3.0})],
)
def test_a_token_of_attention_does_not_know_who_shares_its_step(kind, more):
    torch.manual_seed(0)
    device = DEVICES[kind]
    k_cache, v_cache = torch.randn(2, 12, 16, 2, 32, device=device).unbind(0)
    q = torch.randn(60, 4, 32, device=device)
    tables = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    token, attention = q.new_empty(0), invariant(ops.paged_attention, kind)

    def run(rows, counts, lens, which):
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
        lens = torch.tensor(lens, dtype=torch.int32, device=device)
        return attention(
            q[rows], k_cache, v_cache, starts, lens, tables[which], token, scale=0.2, **more
        )

    whole = run(slice(0, 60), [40, 1, 19], [50, 33, 19], [0, 1, 2])
    expected = ops.paged_attention.reference(
        q,
        k_cache,
        v_cache,
        torch.tensor([0, 40, 41, 60]),
        torch.tensor([50, 33, 19]),
        tables,
        token,
        scale=0.2,
        **more,
    )
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(run(slice(40, 41), [1], [33], [1]), whole[40:41])
    assert torch.equal(run(slice(39, 40), [1], [50], [0]), whole[39:40])
    assert torch.equal(run(slice(10, 40), [30], [50], [0]), whole[10:40])


def test_the_compiler_takes_no_other_kernel_for_them_and_one_range():
    model = ready(build(TINY, dtype=torch.bfloat16, device="meta"))
    report = compile_model(
        model, {"strict": True, "batch_invariant": True}, Platform.named("h200")
    ).report
    found = {
        (choice.op, choice.chosen, choice.tokens)
        for choice in report.kernels
        if "linear" in choice.op or "attention" in choice.op
    }
    assert found == {("linear", INVARIANT, "any"), ("paged_attention", INVARIANT, "any")}


def test_where_there_is_no_such_kernel_that_is_an_error():
    windowed = {**TINY, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    model = ready(build(windowed, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(
        OptionsError,
        match="batch_invariant=True: no such kernel reads and writes state on NVIDIA H200",
    ):
        compile_model(model, {"strict": True, "batch_invariant": True}, Platform.named("h200"))
    with pytest.raises(OptionsError, match="expected glue='eager'"):
        Options(batch_invariant=True, glue="inductor")


def test_a_product_per_head_without_such_a_kernel_is_an_error():
    x, weight = torch.zeros(5, 2, 16, dtype=torch.uint8), torch.zeros(2, 24, 16, dtype=torch.uint8)
    scales = [torch.zeros(*codes.shape[:-1], 1, dtype=torch.uint8) for codes in (x, weight)]
    with pytest.raises(Exception, match="batch_invariant=True: no such kernel serves bmm_mxfp4"):
        atomc.explain(
            lambda *args: ops.bmm_mxfp4(*args, out_dtype=torch.bfloat16),
            x,
            weight,
            *scales,
            options={"batch_invariant": True, "strict": True, "cache": False},
        )
