"""Kernels for Options(batch_invariant=True): a row's result is the same bits whatever the other
rows are.
"""

import pytest
import torch
import torch.nn.functional as F

import atomc
from atomc import ops
from atomc.errors import OptionsError
from atomc.kernels import INVARIANT, load
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.options import Options
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams

assert load(INVARIANT) is None
# The Triton kernels run in its interpreter where there is no GPU.
DEVICES = {"triton": "cuda" if torch.cuda.is_available() else "cpu", "cpu": "cpu"}
ON_GPU = [pytest.mark.gpu] if torch.cuda.is_available() else []
KINDS = [pytest.param("triton", marks=ON_GPU), "cpu"]
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
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_product_to_fp32_does_not_know_the_others(kind, dtype):
    torch.manual_seed(0)
    x, weight = (
        torch.randn(shape, dtype=dtype, device=DEVICES[kind]) for shape in ((70, 48), (40, 48))
    )
    linear = invariant(ops.linear_fp32, kind)
    whole = linear(x, weight)
    torch.testing.assert_close(whole, ops.linear_fp32.reference(x, weight), atol=1e-5, rtol=1e-5)
    for rows in (slice(0, 1), slice(3, 20), slice(69, 70), slice(0, 0)):
        assert torch.equal(linear(x[rows], weight), whole[rows])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_an_adapter_does_not_know_the_others(kind):
    torch.manual_seed(0)
    y, x, a, b = (
        torch.randn(shape, device=DEVICES[kind])
        for shape in ((20, 40), (20, 48), (1, 4, 48), (40, 4))
    )
    adapter, given = invariant(ops.lora_linear, kind), (a, b.t()[None])
    whole = adapter(y, x, *given, scale=2.0)
    expected = ops.lora_linear.reference(y, x, *given, scale=2.0)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    for rows in (slice(0, 1), slice(3, 9)):
        assert torch.equal(adapter(y[rows], x[rows], *given, scale=2.0), whole[rows])


def test_the_adapter_of_a_layer_under_torch_compile_is_served_by_such_a_kernel():
    def adapted(x, weight, a, b):
        return F.linear(x, weight) + F.linear(F.linear(x, a), b) * 2.0

    given = [torch.randn(shape) for shape in ((5, 48), (40, 48), (4, 48), (40, 4))]
    options = {"batch_invariant": True, "strict": True, "cache": False}
    report = atomc.explain(adapted, *given, options=options)
    assert {(choice.op, choice.chosen) for choice in report.kernels} == {
        ("linear", INVARIANT),
        ("lora_linear", INVARIANT),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_a_mixture_of_experts_does_not_know_the_others(kind, dtype):
    torch.manual_seed(0)
    x, w13, w2 = (
        torch.randn(shape, dtype=dtype, device=DEVICES[kind]) * 0.3
        for shape in ((37, 48), (5, 2 * 24, 48), (5, 48, 24))
    )
    ids = torch.rand(37, 5, device=DEVICES[kind]).topk(3).indices.int()
    weights = torch.rand(37, 3, device=DEVICES[kind])
    experts = invariant(ops.moe_experts, kind)
    whole = experts(x, ids, weights, w13, w2)
    expected = ops.moe_experts.reference(x, ids, weights, w13, w2)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, expected, atol=atol, rtol=1e-2)
    for rows in (slice(0, 1), slice(3, 20), slice(36, 37), slice(0, 0)):
        assert torch.equal(experts(x[rows], ids[rows], weights[rows], w13, w2), whole[rows])


@pytest.mark.gpu
def test_experts_of_more_elements_than_32_bits_count():
    tokens, inner, hidden = 2**17 + 5, 2048, 16  # 8 choices: 2**31 elements between the products
    torch.manual_seed(0)
    x, w13, w2 = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.3
        for shape in ((tokens, hidden), (8, 2 * inner, hidden), (8, hidden, inner))
    )
    ids = torch.arange(8, device="cuda", dtype=torch.int32).expand(tokens, 8)
    weights = torch.rand(tokens, 8, device="cuda")
    experts, last = invariant(ops.moe_experts, "triton"), slice(-7, None)
    found = experts(x, ids, weights, w13, w2)[last]
    assert torch.equal(found, experts(x[last], ids[last], weights[last], w13, w2))


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
    [
        pytest.param("triton", {}, marks=ON_GPU),
        ("cpu", {}),
        ("cpu", {"window": 7}),
        ("cpu", {"softcap": 3.0}),
    ],
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_does_not_know_which_others_are_encoded_with_it(kind):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 60, 4, 32, device=DEVICES[kind]).unbind(0)
    attention = invariant(ops.varlen_attention, kind)

    def run(rows, lengths):
        starts = torch.tensor([0, *lengths], device=q.device).cumsum(0).int()
        return attention(q[rows], k[rows], v[rows], starts, scale=0.2)

    whole = run(slice(0, 60), [40, 1, 19])
    expected = ops.varlen_attention.reference(q, k, v, torch.tensor([0, 40, 41, 60]), scale=0.2)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(run(slice(0, 40), [40]), whole[:40])
    assert torch.equal(run(slice(40, 60), [1, 19]), whole[40:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_a_product_per_head_does_not_know_the_others(kind, dtype):
    torch.manual_seed(0)
    device = DEVICES[kind]
    x = torch.randn(70, 3, 56, dtype=dtype, device=device)[..., :48]
    weight = torch.randn(3, 40, 48, dtype=dtype, device=device)
    product = invariant(ops.linear_by_head, kind)
    for of_head in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        whole = product(x, of_head)
        atol = 1e-4 if dtype == torch.float32 else 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            whole, ops.linear_by_head.reference(x, of_head), atol=atol, rtol=1e-2
        )
        for rows in (slice(0, 1), slice(3, 20), slice(69, 70), slice(0, 0)):
            assert torch.equal(product(x[rows], of_head), whole[rows])


@pytest.mark.parametrize(
    ("scaled", "heads"),
    [(False, 4), (False, 40), (True, 4), pytest.param(True, 40, marks=pytest.mark.slow)],
    ids=["4", "40", "fp8-4", "fp8-40"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_latent_attention_does_not_know_who_shares_its_step(kind, scaled, heads):
    torch.manual_seed(0)
    device, latent, rotated = DEVICES[kind], 32, 16
    cache = torch.randn(12, 16, latent + rotated, device=device)
    q = torch.randn(60, heads, latent + rotated, device=device)
    tables = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    if scaled:
        cache = (cache * 10).to(torch.float8_e4m3fn)
    more = {"kv_scale": torch.tensor([0.1], device=device)} if scaled else {}
    more |= {"latent": latent, "scale": 0.2}
    token, attention = q.new_empty(0), invariant(ops.mla_absorbed_attention, kind)

    def run(rows, counts, lens, which):
        starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
        lens = torch.tensor(lens, dtype=torch.int32, device=device)
        return attention(q[rows], cache, starts, lens, tables[which], token, **more)

    whole = run(slice(0, 60), [40, 1, 19], [50, 33, 19], [0, 1, 2])
    starts, lens = torch.tensor([0, 40, 41, 60]), torch.tensor([50, 33, 19])
    expected = ops.mla_absorbed_attention.reference(q, cache, starts, lens, tables, token, **more)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(run(slice(40, 41), [1], [33], [1]), whole[40:41])
    assert torch.equal(run(slice(39, 40), [1], [50], [0]), whole[39:40])
    assert torch.equal(run(slice(10, 40), [30], [50], [0]), whole[10:40])


LATENT = TINY | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


@pytest.mark.rotating
def test_latent_attention_is_absorbed_in_every_step_and_experts_run_by_such_kernels():
    model = ready(create_model(LATENT, dtype=torch.bfloat16, device="meta"))
    report = compile_model(
        model, {"strict": True, "batch_invariant": True}, Platform.named("h200")
    ).report
    found = {
        (choice.op, choice.chosen, choice.tokens)
        for choice in report.kernels
        if any(word in choice.op for word in ("linear", "attention", "experts"))
    }
    names = ("linear", "linear_by_head", "linear_fp32", "mla_absorbed_attention", "moe_experts")
    assert found == {(name, INVARIANT, "any") for name in names}


@pytest.mark.rotating
def test_a_request_over_a_latent_cache_gets_the_bits_that_it_gets_alone():
    torch.manual_seed(0)
    model = ready(create_model(LATENT, dtype=torch.bfloat16))
    options = {"strict": True, "glue": "eager", "cache": False, "batch_invariant": True}
    llm = LLM(
        model, options=options, max_model_len=96, max_num_batched_tokens=24,
        enable_prefix_caching=False, progress=False,
    )  # fmt: skip
    prompts = [torch.randint(1, 128, (n,)).tolist() for n in (5, 31, 1, 17)]
    params = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)

    def told(found):
        return [(each.token_ids, each.logprobs) for each in found]

    together = told(llm.generate(prompts, params))
    alone = [told(llm.generate([prompt], params))[0] for prompt in prompts]
    assert together == alone


def test_the_compiler_takes_no_other_kernel_for_them_and_one_range():
    model = ready(create_model(TINY, dtype=torch.bfloat16, device="meta"))
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
    model = ready(create_model(windowed, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(
        OptionsError,
        match="batch_invariant=True: no such kernel reads and writes state on NVIDIA H200",
    ):
        compile_model(model, {"strict": True, "batch_invariant": True}, Platform.named("h200"))
    with pytest.raises(OptionsError, match="expected glue='eager'"):
        Options(batch_invariant=True, glue="inductor")


def test_quantized_experts_without_such_a_kernel_are_an_error():
    x, ids, weights = torch.randn(3, 32), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    w13, w2 = (torch.zeros(shape, dtype=torch.int8) for shape in ((2, 64, 32), (2, 32, 32)))
    scales = torch.ones(2, 64, 1), torch.ones(2, 32, 1)
    with pytest.raises(OptionsError, match="no such kernel serves moe_experts_int8"):
        atomc.explain(
            lambda *args: ops.moe_experts_int8(*args, out_dtype=torch.float32),
            *ops.quant_int8_per_token(x), ids, weights, w13, scales[0], w2, scales[1],
            options={"batch_invariant": True, "strict": True, "cache": False},
        )  # fmt: skip


@pytest.mark.rotating
def test_a_product_per_head_without_such_a_kernel_is_an_error():
    x, weight = torch.zeros(5, 2, 16, dtype=torch.uint8), torch.zeros(2, 24, 16, dtype=torch.uint8)
    scales = [torch.zeros(*codes.shape[:-1], 1, dtype=torch.uint8) for codes in (x, weight)]
    with pytest.raises(OptionsError, match="no such kernel serves bmm_mxfp4"):
        atomc.explain(
            lambda *args: ops.bmm_mxfp4(*args, out_dtype=torch.bfloat16),
            x,
            weight,
            *scales,
            options={"batch_invariant": True, "strict": True, "cache": False},
        )
