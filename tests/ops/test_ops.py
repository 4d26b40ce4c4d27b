"""What ops mean: against formulas, against torch and transformers, and as torch.library sees
them.
"""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import CASES
from kernel_cases.draw import Draw
from serving import resident_bytes
from torch import Tensor
from torch.testing import assert_close

from atomc import ops
from atomc.ops.formats import FP8
from atomc.ops.op import op_of, register_kernel
from atomc.ops.rope import ROPE_STYLES, columns_per_angle

EVERY_CASE = [
    pytest.param(name, case, id=f"{name}-{case}") for name, cases in CASES.items() for case in cases
]
# Per change each case in one dtype, by turns.
CASES_AND_DTYPES = [
    pytest.param(
        *case.values,
        dtype,
        id=f"{case.id}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.slow] * (turn % 2),
    )
    for number, case in enumerate(EVERY_CASE)
    for turn, dtype in enumerate((torch.float32, torch.bfloat16), start=number)
]
FIRST_CASES = [pytest.param(name, next(iter(cases)), id=name) for name, cases in CASES.items()]


def bound(name: str, case: str, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = ops.REGISTRY[name].signature.bind(**CASES[name][case](Draw(dtype)))
    return call.args, call.kwargs


# As torch.library sees them


def test_every_op_has_cases() -> None:
    assert set(CASES) == set(ops.REGISTRY)


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize(("name", "case", "dtype"), CASES_AND_DTYPES)
def test_the_schema_tells_what_is_written_and_the_shape_rule_what_comes_out(
    name: str, case: str, dtype: torch.dtype
) -> None:
    args, kwargs = bound(name, case, dtype)
    # The check of the schema multiplies each input, for which torch has nothing in fp8.
    fp8 = any(
        isinstance(value, Tensor) and value.dtype in FP8 for value in (*args, *kwargs.values())
    )
    checks = ("test_faketensor",) if fp8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.REGISTRY[name].overload, args, kwargs, test_utils=checks)


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize(("name", "case"), FIRST_CASES)
def test_aot_traces_the_op_with_symbolic_sizes(name: str, case: str) -> None:
    args, kwargs = bound(name, case, torch.float32)
    torch.library.opcheck(
        ops.REGISTRY[name].overload, args, kwargs, test_utils="test_aot_dispatch_dynamic"
    )


def test_a_call_is_one_node_of_a_traced_graph() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return ops.rms_norm(x, weight, 1e-5, style="before")

    graph = torch.export.export(Norm(), (torch.randn(3, 8), torch.randn(8))).graph
    [node] = [node for node in graph.nodes if node.op == "call_function"]
    assert op_of(node.target) is ops.rms_norm


# Of these nothing comes back that depends on a number which has gradients, or only codes do; or what
# processes gather, of which PyTorch has a derivative only with some backends.
NO_GRADIENTS = (
    "all_gather",
    "dispatch_tokens",
    "kv_write",
    "mla_kv_write",
    "bmm_mxfp4",
    "count_experts",
    "kv_b_half",
    "index_topk",
    "index_write",
    "paged_index_topk",
    "chosen_mask",
)


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in NO_GRADIENTS and "quant" not in name]
)
def test_a_call_with_gradients_has_those_of_the_meaning(name: str) -> None:
    op = ops.REGISTRY[name]

    def gradients(function: Any) -> dict[str, Tensor | None]:
        arguments = next(iter(CASES[name].values()))(Draw(torch.float32))
        leaves = {
            key: value.requires_grad_()
            for key, value in arguments.items()
            if isinstance(value, Tensor) and value.is_floating_point() and key not in op.mutates
            if value.dtype not in FP8
        }
        out = function(**arguments)
        parts = out if isinstance(out, tuple) else (out,)
        # The squares of a cos and a sin alone add up to a constant.
        loss = sum(i * part.square().sum() for i, part in enumerate(parts, start=1))
        return dict(
            zip(
                leaves,
                torch.autograd.grad(loss, list(leaves.values()), allow_unused=True),
                strict=True,
            )
        )

    of_the_op, of_the_meaning = gradients(op), gradients(op.reference)
    assert any(grad is not None and grad.any() for grad in of_the_op.values())
    assert {key for key, grad in of_the_op.items() if grad is None} == {
        key for key, grad in of_the_meaning.items() if grad is None
    }
    for key, grad in of_the_op.items():
        assert grad is None or torch.equal(grad, of_the_meaning[key])


def test_without_gradients_the_op_runs_and_not_the_meaning() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        assert not ops.rms_norm(x, torch.ones(8), 1e-5).requires_grad


def test_a_kernel_for_an_unknown_op_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no op 'softmax'; ops are .*'rms_norm'"):
        register_kernel("softmax", "mine")


def test_a_kernel_that_prepares_what_the_op_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prepare names \['bias'\]"):
        register_kernel("rms_norm", "mine", prepare={"bias": lambda weight: None})


# Norms and activations


def hf(module: str) -> Any:
    return pytest.importorskip(f"transformers.models.{module}.modeling_{module}")


def with_weight(norm: torch.nn.Module, weight: Tensor) -> torch.nn.Module:
    norm.weight.data = weight
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("style", "module", "norm"),
    [
        ("after", "llama", "LlamaRMSNorm"),
        ("before", "gpt_oss", "GptOssRMSNorm"),
        ("one_plus", "gemma3", "Gemma3RMSNorm"),
    ],
)
def test_rms_norm_styles_equal_hugging_face_bit_for_bit(
    style: str, module: str, norm: str, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(7, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    expected = with_weight(getattr(hf(module), norm)(64, eps=1e-5), weight)(x)
    assert_close(ops.rms_norm(x, weight, 1e-5, style), expected, rtol=0, atol=0)


def test_rms_norm_before_is_the_one_of_torch() -> None:
    x, weight = torch.randn(7, 80), torch.randn(80)
    assert_close(ops.rms_norm(x, weight, 1e-5, "before"), F.rms_norm(x, (80,), weight, 1e-5))


def test_rms_norm_follows_its_formula() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    rms = math.sqrt((9 + 16) / 2)
    for style, scale in (("after", weight), ("before", weight), ("one_plus", 1 + weight)):
        assert_close(ops.rms_norm(x, weight, 0.0, style), x / rms * scale)


def test_an_unknown_rms_norm_style_is_refused() -> None:
    with pytest.raises(ValueError, match="style 'sideways' is not one of"):
        ops.rms_norm(torch.randn(1, 8), torch.ones(8), 1e-5, "sideways")


def test_layer_norm_follows_its_formula() -> None:
    x, weight, bias = torch.randn(7, 64), torch.randn(64), torch.randn(64)
    centered = x - x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), expected)


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    x, residual, weight, bias = (
        torch.randn(7, 64).bfloat16(),
        torch.randn(7, 64).bfloat16(),
        torch.randn(64).bfloat16(),
        torch.randn(64).bfloat16(),
    )
    total = x + residual
    rms = ops.add_rms_norm(x, residual, weight, 1e-5, "before")
    assert_close(rms, (ops.rms_norm(total, weight, 1e-5, "before"), total), rtol=0, atol=0)
    layer = ops.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert_close(layer, (ops.layer_norm(total, weight, bias, 1e-5), total), rtol=0, atol=0)


def test_gated_activations_follow_their_formulas() -> None:
    gate, up = torch.randn(7, 64), torch.randn(7, 64)
    assert_close(ops.silu_and_mul(gate, up), gate / (1 + (-gate).exp()) * up)
    assert_close(ops.gelu_and_mul(gate, up), gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    assert_close(ops.gelu_and_mul(gate, up, "tanh"), gate * 0.5 * (1 + inner.tanh()) * up)


def test_linear_and_embedding_follow_their_formulas() -> None:
    x, weight, bias = torch.randn(2, 7, 64), torch.randn(33, 64), torch.randn(33)
    assert_close(ops.linear(x, weight, bias), torch.einsum("btk,nk->btn", x, weight) + bias)
    assert_close(ops.linear(x, weight), torch.einsum("btk,nk->btn", x, weight))
    x, weight = x.bfloat16(), weight.bfloat16()
    exact = torch.einsum("btk,nk->btn", x.double(), weight.double())
    assert_close(ops.linear_fp32(x, weight), exact.float())
    assert torch.equal(
        ops.embedding(torch.tensor([[2, 0]]), weight), torch.stack((weight[2], weight[0]))[None]
    )


# Rotary positions


def angles(tokens: int, pairs: int) -> Tensor:
    return torch.arange(3.0, 3 + tokens)[:, None] * 10000.0 ** -(torch.arange(pairs) / pairs)


def as_rotation(x: Tensor, angle: Tensor) -> Tensor:
    """x [T, N, R / 2, 2] with each pair turned by its angle [T, R / 2]."""
    return torch.view_as_real(
        torch.view_as_complex(x.contiguous()) * torch.polar(torch.ones(()), angle)[:, None]
    )


def test_rope_turns_the_pairs_that_its_style_names() -> None:
    x, angle = torch.randn(7, 3, 64), angles(7, 32)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    halves = as_rotation(x.view(7, 3, 2, 32).transpose(-1, -2), angle).transpose(-1, -2).flatten(-2)
    pairs = as_rotation(x.view(7, 3, 32, 2), angle)
    assert_close(ops.rope(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), "neox"), halves)
    assert_close(ops.rope(x, cos, sin, "half"), halves)
    assert_close(ops.rope(x, cos, sin, "gptj"), pairs.flatten(-2))
    assert_close(ops.rope(x, cos, sin, "pairs_to_half"), pairs.transpose(-1, -2).flatten(-2))
    repeated = (table.repeat_interleave(2, -1) for table in (cos, sin))
    assert_close(ops.rope(x, *repeated, "pairs"), pairs.flatten(-2))


@pytest.mark.parametrize("style", ROPE_STYLES)
def test_a_partial_rotation_passes_the_rest_through(style: str) -> None:
    x, angle = (
        torch.randn(7, 3, 80),
        angles(7, 16)[:, None].repeat(1, 1, 2 // columns_per_angle(style)),
    )
    out = ops.rope(x, angle.cos(), angle.sin(), style)
    assert torch.equal(out[..., 32:], x[..., 32:])
    assert torch.equal(
        out[..., :32], ops.rope(x[..., :32].contiguous(), angle.cos(), angle.sin(), style)
    )


@pytest.mark.parametrize(
    ("style", "module", "function", "width"),
    [
        ("neox", "llama", "apply_rotary_pos_emb", 64),
        ("half", "gpt_oss", "apply_rotary_pos_emb", 32),
        ("pairs_to_half", "deepseek_v3", "apply_rotary_pos_emb_interleave", 32),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_styles_equal_hugging_face_bit_for_bit(
    style: str, module: str, function: str, width: int, dtype: torch.dtype
) -> None:
    q, k = torch.randn(2, 8, 7, 64, dtype=dtype), torch.randn(2, 2, 7, 64, dtype=dtype)
    angle = angles(7, width)[None].to(dtype)
    cos, sin = angle.cos(), angle.sin()
    # DeepSeek's tables are full-width, of which it would use the first half alone.
    given = (
        (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        if style == "pairs_to_half"
        else (cos, sin)
    )
    expected = getattr(hf(module), function)(q, k, *given)
    actual = tuple(ops.rope(x, cos[:, None], sin[:, None], style) for x in (q, k))
    assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES["qk_norm_rope"])
def test_qk_norm_rope_is_rope_of_the_norms(case: str) -> None:
    a = CASES["qk_norm_rope"][case](Draw(torch.bfloat16))
    expected = tuple(
        ops.rope(ops.rms_norm(x, w, a["eps"], a["norm_style"]), a["cos"], a["sin"], a["rope_style"])
        for x, w in ((a["q"], a["q_weight"]), (a["k"], a["k_weight"]))
    )
    assert_close(ops.qk_norm_rope(**a), expected, rtol=0, atol=0)


# Attention


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """scaled_dot_product_attention on [..., T, N, D], each key head repeated by hand."""
    group = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(group, -2), v.repeat_interleave(group, -2)
    heads = (x.transpose(-2, -3) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads, mask, is_causal=causal, scale=scale).transpose(
        -2, -3
    )


@pytest.mark.parametrize(
    "case",
    [
        "causal",
        "one token",
        "odd sizes",
        "one key head, narrow",
        "batch",
        "not causal",
        "causal, more keys",
        "packed",
        "heads before tokens",
        "with a handle",
    ],
)
def test_attention_is_scaled_dot_product_attention(case: str) -> None:
    a = CASES["attention"][case](Draw(torch.float32))
    expected = sdpa(a["q"], a["k"], a["v"], a["scale"], causal=a.get("causal", True))
    assert_close(ops.attention(**a), expected)


@pytest.mark.parametrize("case", ["bool mask", "float mask", "smallest number as mask"])
def test_attention_takes_the_masks_of_scaled_dot_product_attention(case: str) -> None:
    a = CASES["attention"][case](Draw(torch.float32))
    assert_close(ops.attention(**a), sdpa(a["q"], a["k"], a["v"], a["scale"], a["mask"]))


@pytest.mark.parametrize("case", ["bool mask", "float mask that hides a row"])
def test_a_row_that_sees_no_key_is_zero(case: str) -> None:
    a = CASES["attention"][case](Draw(torch.float32))
    assert not ops.attention(**a)[2].any()


@pytest.mark.parametrize("case", ["softcap", "sinks"])
def test_a_query_that_is_not_a_number_gives_none(case: str) -> None:
    a = CASES["attention"][case](Draw(torch.float32))
    a["q"][0] = math.nan
    out = ops.attention(**a)
    assert out[0].isnan().all() and not out[1:].isnan().any()


def test_the_window_counts_the_query_itself() -> None:
    a = CASES["attention"]["window"](Draw(torch.float32))
    out = ops.attention(**a)
    for t in range(33):
        keys = slice(max(0, t - 4), t + 1)
        assert_close(
            out[t : t + 1], sdpa(a["q"][t : t + 1], a["k"][keys], a["v"][keys], a["scale"])
        )


def hugging_face_eager(
    module: str, a: dict[str, Any], sinks: Tensor | None, **kwargs: Any
) -> Tensor:
    """The eager attention of a transformers model, with its own causal mask."""
    q, k, v = (a[name].transpose(0, 1)[None] for name in "qkv")
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo().min)[None, None]
    layer = SimpleNamespace(
        num_key_value_groups=q.shape[1] // k.shape[1], sinks=sinks, training=False
    )
    return hf(module).eager_attention_forward(
        layer, q, k, v, mask, scaling=a["scale"], dropout=0.0, **kwargs
    )[0][0]


def test_softcap_is_that_of_gemma() -> None:
    a = CASES["attention"]["softcap"](Draw(torch.float32))
    assert_close(ops.attention(**a), hugging_face_eager("gemma2", a, None, softcap=a["softcap"]))


def test_sinks_are_those_of_gpt_oss() -> None:
    a = CASES["attention"]["sinks"](Draw(torch.float32))
    assert_close(ops.attention(**a), hugging_face_eager("gpt_oss", a, a["sinks"]))


# State


@pytest.mark.parametrize("layout", ops.LAYOUTS)
@pytest.mark.parametrize("case", CASES["kv_write"])
def test_kv_write_writes_each_row_to_its_slot_and_nothing_else(case: str, layout: str) -> None:
    a = CASES["kv_write"][case](Draw(torch.float32, layout=layout))
    expected = {name: a[f"{name}_cache"].clone() for name in "kv"}
    for name, cache in expected.items():
        rows, offsets = a[name].reshape(-1, *a[name].shape[-2:]), a["slots"].tolist()
        for number, row in enumerate(rows):
            # Sequences that share offsets have one block each.
            sequence, token = divmod(number, len(offsets))
            if offsets[token] >= 0:
                slot = sequence * cache.shape[1] + offsets[token]
                scale = a.get(f"{name}_scale", torch.ones(1))
                cache[slot // cache.shape[1], slot % cache.shape[1]] = (row * (1 / scale)).clamp(
                    -448, 448
                )
    token = ops.kv_write(**a)
    assert token.shape == (0,)
    for name, cache in expected.items():
        assert torch.equal(a[f"{name}_cache"], cache)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no norm"])
def test_the_joined_writes_are_their_parts(norm: bool) -> None:
    name = "qk_norm_rope_kv_write" if norm else "rope_kv_write"
    for case in CASES[name].values():
        a, parts = case(Draw(torch.bfloat16)), case(Draw(torch.bfloat16))
        q, token = ops.REGISTRY[name](**a)
        q_part, k_part = parts["q"], parts["k"]
        if norm:
            q_part = ops.rms_norm(q_part, parts["q_weight"], parts["eps"], parts["norm_style"])
            k_part = ops.rms_norm(k_part, parts["k_weight"], parts["eps"], parts["norm_style"])
        how = parts["cos"], parts["sin"], parts["rope_style"], parts.get("in_fp32", False)
        q_part, k_part = (ops.rope(x, *how) for x in (q_part, k_part))
        scales = {scale: parts[scale] for scale in ("k_scale", "v_scale") if scale in parts}
        ops.kv_write(
            k_part, parts["v"], parts["k_cache"], parts["v_cache"], parts["slots"], **scales
        )
        assert token.shape == (0,)
        assert torch.equal(q, q_part)
        assert torch.equal(a["k_cache"], parts["k_cache"])
        assert torch.equal(a["v_cache"], parts["v_cache"])


@pytest.mark.parametrize("case", CASES["varlen_attention"])
def test_varlen_attention_is_attention_of_each_sequence_to_itself(case: str) -> None:
    a = CASES["varlen_attention"][case](Draw(torch.float32))
    bounds, q = a["query_start"].tolist(), a["q"]
    sequence = torch.bucketize(torch.arange(len(q)), torch.tensor(bounds), right=True)
    seen = (sequence[:, None] == sequence) & (sequence <= len(bounds) - 1)
    out = ops.varlen_attention(**a)
    assert out.dtype == q.dtype
    assert_close(out, sdpa(q, a["k"], a["v"], a["scale"], seen[None]).nan_to_num(0.0))


@pytest.mark.parametrize("layout", ops.LAYOUTS)
@pytest.mark.parametrize(
    "case",
    [case for case in CASES["paged_attention"] if "softcap" not in case and "sinks" not in case],
)
def test_paged_attention_is_attention_of_each_sequence_over_its_keys(
    case: str, layout: str
) -> None:
    a = CASES["paged_attention"][case](Draw(torch.float32, layout=layout))
    out, q = (x.reshape(-1, *x.shape[-2:]) for x in (ops.paged_attention(**a), a["q"]))
    caches = [a[f"{name}_cache"].float() * a.get(f"{name}_scale", torch.ones(1)) for name in "kv"]
    bounds, block_size = a["query_start"].tolist(), a["k_cache"].shape[1]
    for s, length in enumerate(a["seq_lens"].tolist()):
        rows = slice(bounds[s], bounds[s + 1])
        slots = [
            int(a["block_tables"][s, p // block_size]) * block_size + p % block_size
            for p in range(length)
        ]
        k, v = (
            torch.stack([cache[slot // block_size, slot % block_size] for slot in slots])
            if slots
            else cache[0, :0]
            for cache in caches
        )
        new = rows.stop - rows.start
        seen = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        if a.get("window"):
            seen = seen.triu(length - new - a["window"] + 1)
        assert_close(out[rows], sdpa(q[rows], k, v, a["scale"], seen))
    assert not out[bounds[-1] :].any()


@pytest.mark.parametrize("layout", ops.LAYOUTS)
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"window": 6},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-1, 1, 8)},
        {"window": 6, "softcap": 2.0, "sinks": torch.linspace(-1, 1, 8)},
    ],
    ids=["plain", "window", "softcap", "sinks", "all"],
)
@pytest.mark.parametrize(
    "chunks", [[40], [17, 16, 7], [36, 1, 1, 1, 1]], ids=["whole", "chunks", "decode"]
)
def test_writing_and_then_reading_is_attention_over_the_whole_sequence(
    chunks: list[int], attributes: dict[str, Any], layout: str
) -> None:
    draw = Draw(torch.float32, layout=layout)
    q, k, v = draw.normal(40, 8, 64), draw.normal(40, 2, 64), draw.normal(40, 2, 64)
    k_cache, v_cache, [blocks] = draw.caches([40], 2, 64)
    block_size = k_cache.shape[1]
    outputs, start = [], 0
    for new in chunks:
        rows = slice(start, start + new)
        slots = torch.tensor(
            [
                blocks[p // block_size] * block_size + p % block_size
                for p in range(start, start + new)
            ]
        )
        token = ops.kv_write(k[rows], v[rows], k_cache, v_cache, slots)
        start += new
        outputs.append(
            ops.paged_attention(
                q[rows],
                k_cache,
                v_cache,
                torch.tensor([0, new], dtype=torch.int32),
                torch.tensor([start], dtype=torch.int32),
                torch.tensor([blocks], dtype=torch.int32),
                token,
                scale=0.125,
                **attributes,
            )
        )
    assert_close(torch.cat(outputs), ops.attention(q, k, v, scale=0.125, **attributes))


@pytest.mark.parametrize("layout", ops.LAYOUTS.values(), ids=lambda layout: layout.name)
def test_a_cache_lies_in_memory_in_the_order_of_its_layout(layout: ops.Layout) -> None:
    spec = ops.StateSpec.of("kv", "kv", ((2, 64), (2, 64)), torch.bfloat16, layout=layout.name)
    for cache in spec.allocate(3, 5, "cpu").values():
        assert cache.shape == (3, 5, 2, 64)
        assert cache.permute(layout.order).is_contiguous()
        assert not cache.any()
    assert spec.bytes_per_token() == 2 * 2 * 64 * 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_a_cache_on_a_cpu_are_held_once_they_were_written() -> None:
    spec = ops.StateSpec.of("kv", "kv", ((2, 64), (2, 64)), torch.float8_e4m3fn)
    before = resident_bytes()
    [k, v] = spec.allocate(2**18, 16, "cpu").values()  # 512 MiB each
    assert resident_bytes() - before < k.nbytes / 16
    assert k.data_ptr() % 64 == 0 and v.data_ptr() % 64 == 0
    v.view(torch.uint8)[: 2**17] = 1
    assert resident_bytes() - before > v.nbytes / 3
    assert not v[-1].view(torch.uint8).any()


def test_a_cache_that_no_host_has_memory_for_is_an_error_as_torch_raises_it() -> None:
    spec = ops.StateSpec.of("kv", "kv", ((2, 64), (2, 64)), torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"can't allocate memory: [0-9]+ bytes of state"):
        spec.allocate(2**50, 16, "cpu")


def test_a_handle_is_no_part_of_the_state_dict() -> None:
    module = torch.nn.Module()
    module.kv = ops.kv_state(2, 64)
    assert module.kv.shape == (0, 2, 64)
    assert not module.state_dict()
