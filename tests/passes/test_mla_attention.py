"""Multi-head latent attention: the op, and its way through compiler and runtime.

T tokens, H heads, P and V what is not rotated of a key and a value, L latent width, R rotated width.
"""

from collections import Counter

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from latent_toy import LATENT, ROTATED, VOCAB, latent_toy
from torch import Tensor, nn
from torch.testing import assert_close

from atomc import ops
from atomc.kernels.torch.mla_attention import expands
from atomc.ops.state import GroupStep, Step
from atomc.platform import Platform
from atomc.program import Program, compile_model


def by_hand(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, weight: Tensor, scale: float
) -> Tensor:
    """One head and one query at a time. [T, H, .] -> [T, H, V]."""
    tokens, heads, nope = q_nope.shape
    out = torch.empty(tokens, heads, weight.shape[0] // heads - nope)
    for h, of_head in enumerate(weight.chunk(heads)):
        for t in range(tokens):
            keys = torch.cat((latent[: t + 1] @ of_head[:nope].T, k_rope[: t + 1, 0]), -1)
            scores = keys @ torch.cat((q_nope[t, h], q_rope[t, h])) * scale
            out[t, h] = scores.softmax(0) @ (latent[: t + 1] @ of_head[nope:].T)
    return out


@pytest.mark.parametrize("case", ["several tokens", "narrow values", "wide values"])
def test_latent_attention_is_that_of_keys_and_values_made_from_the_latent(case: str) -> None:
    a = CASES["mla_attention"][case](Draw(torch.float32))
    assert_close(ops.mla_attention(**a), by_hand(**a))


def test_a_state_handle_changes_nothing_outside_the_runtime() -> None:
    a = CASES["mla_attention"]["batch"](Draw(torch.float32))
    handle = ops.latent_state(a["latent"].shape[-1], a["k_rope"].shape[-1])
    assert handle.shape == (0, a["latent"].shape[-1] + a["k_rope"].shape[-1])
    assert torch.equal(ops.mla_attention(**a, kv=handle), ops.mla_attention(**a))


@pytest.mark.parametrize("q_lora_rank", [None, 20])
def test_latent_attention_is_that_of_a_stock_deepseek_v3_layer(q_lora_rank: int | None) -> None:
    stock = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = stock.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=3,
        num_key_value_heads=3,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    layer = stock.DeepseekV3Attention(config, 0)
    x, angles = torch.randn(2, 9, 32), torch.randn(2, 9, 4).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    with torch.no_grad():
        q = (
            layer.q_proj(x)
            if q_lora_rank is None
            else layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        )
        q_nope, q_rope = q.unflatten(-1, (3, 20)).split([12, 8], -1)
        latent, k_rope = layer.kv_a_proj_with_mqa(x).split([24, 8], -1)
        q_rope, k_rope = (
            ops.rope(each, cos[:, :, None, :4], sin[:, :, None, :4], "pairs_to_half")
            for each in (q_rope, k_rope.unsqueeze(-2))
        )
        found = ops.mla_attention(
            q_nope,
            q_rope,
            layer.kv_a_layernorm(latent),
            k_rope,
            layer.kv_b_proj.weight,
            scale=layer.scaling,
        )
        assert_close(layer.o_proj(found.flatten(-2)), layer(x, (cos, sin), None)[0])


# ---- compiled for the runtime

OPTIONS = {"strict": True, "glue": "eager", "cache": False}


@pytest.mark.parametrize("layers", [1, 3])
def test_each_layer_rotates_and_writes_in_one_op_and_attends_to_the_latent_cache(
    layers: int,
) -> None:
    program = compile_model(latent_toy(layers), OPTIONS)
    assert program.report.matches["bind_state"] == layers
    assert program.report.matches["mla_rope_kv_write"] == layers
    few, many = (
        Counter(choice.op for choice in program.report.kernels if choice.tokens == tokens)
        for tokens in ("1 to 256", "257 and more")
    )
    assert few["mla_absorbed_attention"] == few["mla_rope_kv_write"] == layers
    assert few["linear_by_head"] == 2 * layers and not few["mla_paged_attention"]
    assert many["mla_paged_attention"] == many["mla_rope_kv_write"] == layers
    assert not many["linear_by_head"] and not {"mla_attention", "rope"} & {*few, *many}
    assert [str(spec) for spec in program.specs] == [
        f"layers.{i}: latent [32] torch.float64 layout paged" for i in range(layers)
    ]


def test_keys_without_rope_are_written_by_themselves() -> None:
    model = latent_toy(1)
    model.layers[0].rotate = lambda x, cos, sin: x
    program = compile_model(model, OPTIONS)
    assert not program.report.matches["mla_rope_kv_write"]
    assert "mla_kv_write in layers.0" in program.report.why("mla_rope_kv_write")
    assert "mla_kv_write" in {choice.op for choice in program.report.kernels}


def test_on_a_gpu_queries_are_projected_to_the_latent_space_before_they_are_written() -> None:
    program = compile_model(
        latent_toy(1, "meta", torch.bfloat16), OPTIONS, platform=Platform.named("h200")
    )
    texts = [stage.text for stage in program.report.stages if stage.name == "select_mla_form"]
    assert texts
    for text in texts:
        assert "mla_rope_kv_write(linear_by_head" in text and "aten.cat" not in text
    chosen = {(choice.op, choice.chosen, choice.tokens) for choice in program.report.kernels}
    latent = {found for found in chosen if found[0].startswith("mla_")}
    assert {op: provider for op, provider, _ in latent} == {
        "mla_rope_kv_write": "triton",
        "mla_absorbed_attention": "triton",
        "mla_paged_attention": "triton",
    }
    assert {t for op, _, t in latent if op == "mla_paged_attention"} == {"257 and more"}


@pytest.mark.parametrize("chunks", [(300, 20, 1, 270), (40, 300, 256, 1)])
def test_both_forms_have_the_logits_of_the_plain_model_over_chunks(chunks: tuple[int, ...]) -> None:
    model = latent_toy()
    ids = torch.arange(sum(chunks)) * 7 % VOCAB
    program = compile_model(model, OPTIONS)
    assert_close(
        paged_logits(program, ids, chunks), model(ids, torch.arange(len(ids))), atol=1e-3, rtol=0
    )


@pytest.mark.parametrize(
    ("new", "length", "expected"),
    [
        (1, 1, True),
        (1, 2, False),
        (300, 300, True),
        (300, 600, True),
        (170, 10**6, False),
        (171, 10**6, True),
    ],
)
def test_keys_and_values_are_computed_where_that_takes_fewer_multiplications(
    new: int, length: int, expected: bool
) -> None:
    of_head = torch.empty(128, 256, 512, device="meta")
    assert expands(new, length, of_head) == expected


@pytest.mark.parametrize("asked", ["option", "handle"])
def test_an_fp8_cache_keeps_codes_of_the_latent_and_the_key_with_one_scale(asked: str) -> None:
    model = latent_toy()
    for layer in model.layers:
        layer.kv_scale = nn.Buffer(torch.tensor([0.02]))
        layer.q.weight *= 0.2  # sharp attention would multiply the rounding of keys
        if asked == "handle":
            layer.kv = nn.Buffer(layer.kv.to(torch.float8_e4m3fn), persistent=False)
    options = {"kv_cache_dtype": "fp8"} if asked == "option" else {}
    program = compile_model(model, {**OPTIONS, **options})
    spec = program.specs[0]
    assert spec.bytes_per_token() == LATENT + ROTATED and spec.scales == ("kv_scale",)
    ids = torch.arange(40) * 7 % VOCAB
    exact = model(ids, torch.arange(40))
    found = paged_logits(program, ids, chunks=(25, 14, 1))
    error = (found - exact).square().mean() / exact.square().mean()
    assert 1e-6 < error < 1e-2  # SQNR of at least 20 dB, and not the plain cache


def paged_logits(
    program: Program,
    ids: Tensor,
    chunks: tuple[int, ...],
    states: list[dict[str, Tensor]] | None = None,
) -> Tensor:
    """The logits of all tokens of one sequence, computed in chunks. states: of its layers, where
    they are to be read afterwards.
    """
    blocks = -(-len(ids) // 16)
    program.bind(states or [spec.allocate(blocks, 16, "cpu") for spec in program.specs])
    table = torch.arange(blocks, dtype=torch.int32).flip(0)
    found, start = [], 0
    for new in chunks:
        rows = torch.arange(start, start + new)
        slots = table[rows // 16].long() * 16 + rows % 16
        starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, new], [start + new]))
        found.append(
            program(
                Step(
                    ids[rows],
                    rows,
                    starts,
                    lengths,
                    torch.arange(new),
                    (GroupStep(slots, table[None]),),
                    torch.zeros(1, dtype=torch.int64),
                )
            )
        )
        start += new
    return torch.cat(found)
