"""Multi-head latent attention: the op, and its way through compiler and runtime.

T tokens, H heads, P and V what is not rotated of a key and a value, L latent width, R rotated width.
"""

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from torch import Tensor
from torch.testing import assert_close

from atomc import ops


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
