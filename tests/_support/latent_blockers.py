"""What keeps the chains of latent attention from firing: rows of the table in test_blockers.py.

A row gives for each blocker a function, its inputs, and patterns of the first reason's kind,
expectation and finding.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from latent import latent_handle
from torch import Tensor

from atomc import ops

# T tokens, H heads, L latent width, R rotated width, P and V what is not rotated of a key and a
# value.
T, H, L, R, P, V = 6, 4, 64, 8, 32, 24
Change = Callable[[Tensor], Tensor]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def same(x: Tensor) -> Tensor:
    return x


def doubled_in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def heads_mixed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


CODES, SCALES = ops.quant_fp8_per_token(rand(T, L))
WEIGHT, WEIGHT_SCALE = (rand(H * (P + V), L) * 20).to(torch.float8_e4m3fn), torch.tensor([0.01])
KEYS = CODES, WEIGHT, SCALES, WEIGHT_SCALE, rand(T, 1, R)
Q_NOPE, Q_LATENT, Q_PE, KV_C, K_PE = (
    rand(T, H, P),
    rand(T, H, L),
    rand(T, H, R),
    rand(T, L),
    rand(T, 1, R),
)
TABLES = rand(T, 1, R // 2), rand(T, 1, R // 2)
ROTATED = Q_LATENT, Q_PE, KV_C, K_PE, *TABLES, latent_handle(L + R)
EXPANDED = Q_NOPE, Q_PE, KV_C, K_PE, rand(H * (P + V), L)
W_K, W_K_SCALE = (rand(H, L, P) * 20).to(torch.float8_e4m3fn), torch.tensor([0.01])
MULTIPLIED = Q_NOPE, Q_PE, KV_C, K_PE, *TABLES, latent_handle(L + R), W_K, W_K_SCALE


def keys_and_values(
    after: Change = same,
    nope: Change = same,
    pe: Change = same,
    dim: int = -1,
    swapped: bool = False,
    out: torch.dtype = torch.bfloat16,
    read: bool = False,
) -> Callable[..., Any]:
    """A product, of each head P columns beside the rotated part, and V."""

    def function(
        x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor
    ) -> Any:
        product = ops.scaled_linear_fp8(x, weight, x_scale, weight_scale, out_dtype=out)
        both = after(product).view(T, H, P + V)
        parts = nope(both[..., :P]), pe(k_pe.expand(T, H, R))
        k = torch.cat(parts[::-1] if swapped else parts, dim)
        return (k, both[..., P:] * 1.5, *([product.abs()] if read else []))

    return function


def expanded(
    after: Change = same,
    nope: Change = same,
    pe: Change = same,
    value: Change = same,
    dim: int = -1,
    swapped: bool = False,
    read: bool = False,
    per_head: bool = False,
    bias: bool = False,
    other_values: bool = False,
    masked: bool = False,
    fewer: bool = False,
    window: int = 0,
) -> Callable[..., Any]:
    """Attention over keys and values of all heads that one product makes from the latent."""

    def function(q: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, weight: Tensor) -> Any:
        product = F.linear(kv_c, weight, weight[:, 0] if bias else None)
        both = after(product).view(T, H, P + V)
        rotated = k_pe * q_pe if per_head else k_pe.expand(T, H, R)
        parts = nope(both[..., :P]), pe(rotated)
        k = torch.cat(parts[::-1] if swapped else parts, dim)
        v = both[..., P:]
        if other_values:
            v = F.linear(kv_c, weight * 2).view(T, H, P + V)[..., P:]
        queries = torch.cat((q, q_pe), -1)[: T - 2 if fewer else T]
        mask = kv_c[:, :T] if masked else None
        found = ops.attention(
            queries, k, value(v), None, mask, scale=0.1, causal=not masked, window=window
        )
        return found, *([k.abs()] if read else [])

    return function


def attention(q: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, handle: Tensor) -> Tensor:
    latent = kv_c.unsqueeze(-2)
    return ops.attention(
        torch.cat((q, q_pe), -1), torch.cat((latent, k_pe), -1), latent, handle, scale=0.1
    )


def latent_attention(
    of_q: Change = same,
    of_k: Change = same,
    after: Change = same,
    read: bool = False,
    other_tables: bool = False,
    key_tables: Change = same,
) -> Callable[..., Any]:
    def function(
        q: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        cos: Tensor,
        sin: Tensor,
        handle: Tensor,
    ) -> Any:
        turned = of_q(rotated(q_pe, cos, sin))
        tables = (sin, cos) if other_tables else (cos, sin)
        key = of_k(rotated(k_pe, *map(key_tables, tables)))
        return attention(after(q), turned, kv_c, key, handle), *([turned.abs()] if read else [])

    return function


def multiplied(
    before: Change = same,
    between: Change = same,
    after: Change = same,
    group: int = 128,
    read: bool = False,
    out: torch.dtype = torch.bfloat16,
) -> Callable[..., Any]:
    """Latent attention whose queries are quantized and brought to the latent space."""

    def function(
        q: Tensor,
        q_pe: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        cos: Tensor,
        sin: Tensor,
        handle: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
    ) -> Any:
        codes, scales = ops.quant_fp8_group(before(q), group)
        product = ops.scaled_bmm_fp8(
            between(codes), weight, scales, weight_scale, out_dtype=out, group=group
        )
        turned = rotated(q_pe, cos, sin), rotated(k_pe, cos, sin)
        found = attention(after(product), turned[0], kv_c, turned[1], handle)
        return found, *([product.abs()] if read else [])

    return function


DOUBLED, MOVED, READ_TOO = (
    r"^mul\(other=2\).* in between",
    r"^to\(.*device=meta\).* in between",
    "^abs .* also reads it",
)
NO_EPS, NO_CASTS = "n/a: it has no eps", "n/a: it has no cast"
QUERIES, PRODUCT = "cat.* reading rope", "mla_rope_kv_write.* reading scaled_bmm_fp8"
CACHE = "n/a: the cache is made where the keys are"

ATTENTION = "attention.* reading cat|cat.* reading"
MLA_ROWS: dict[str, dict[str, Any]] = {
    "mla_attention": {
        "extra user": (expanded(read=True), EXPANDED, "extra user", "no other reader of cat", READ_TOO),
        "mutation": (expanded(after=doubled_in_place), EXPANDED, "extra op", "reading linear", DOUBLED),
        "view that changes meaning": (
            expanded(nope=heads_mixed), EXPANDED, "extra op", "cat.* reading slice", "^permute"),
        "device": "n/a: attention reads tensors of one device",
        "eps differs": NO_EPS,
        "not the last dim": (
            expanded(value=lambda x: x.flip(-1)), EXPANDED, "extra op", "attention.* reading slice", "^flip"),
        "dtype promotion": (
            expanded(nope=lambda x: x.float().to(x.dtype)), EXPANDED, "extra op", "cat.* reading slice", "float32"),
        "operand order": (
            expanded(swapped=True), EXPANDED, "operand order", r"slice\(.*\) before .* in cat", "exchanged"),
        "missing cast": NO_CASTS,
    },
}  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {
    "linear_split_cat": {
        "extra user": (keys_and_values(read=True), KEYS, "extra user", "no other reader of scaled_linear_fp8", READ_TOO),
        "mutation": (keys_and_values(after=doubled_in_place), KEYS, "extra op", "reading scaled_linear_fp8", DOUBLED),
        "view that changes meaning": (
            keys_and_values(nope=heads_mixed), KEYS, "extra op", "cat.* reading slice", "^permute"),
        "device": (
            keys_and_values(nope=lambda x: x.to("meta"), pe=lambda x: x.to("meta")), KEYS, "extra op",
            "cat.* reading slice", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": (
            keys_and_values(pe=lambda x: x.repeat(1, 1, P // R), dim=0), KEYS, "attribute", "cat with dim=-1", "^dim=-3"),
        "dtype promotion": (
            keys_and_values(pe=torch.Tensor.float), KEYS, "dtype", "scaled_linear_fp8 computed in float32", "bfloat16"),
        "operand order": (
            keys_and_values(swapped=True), KEYS, "operand order", r"slice\(.*\) before k_pe in cat", "exchanged"),
        "missing cast": NO_CASTS,
    },
    "mla_rope_kv_write": {
        "extra user": (latent_attention(read=True), ROTATED, "extra user", "no other reader of rope", READ_TOO),
        "mutation": (
            latent_attention(of_k=doubled_in_place), ROTATED, "extra op", "mla_kv_write.* reading rope", DOUBLED),
        "view that changes meaning": (
            latent_attention(of_q=heads_mixed), ROTATED, "extra op", QUERIES, "^permute"),
        "device": CACHE,
        "eps differs": NO_EPS,
        "not the last dim": (
            latent_attention(of_q=lambda x: x.flip(-1)), ROTATED, "extra op", QUERIES, "^flip"),
        "dtype promotion": (
            latent_attention(key_tables=lambda x: x.float()), ROTATED, "same value", "`(cos|sin)` to be .* as elsewhere",
            "float32"),
        "operand order": (
            latent_attention(other_tables=True), ROTATED, "operand order", "cos before sin in rope", "exchanged"),
        "missing cast": NO_CASTS,
    },
    "bmm_rope_kv_write": {
        "extra user": (
            multiplied(read=True), MULTIPLIED, "extra user", "no other reader of scaled_bmm_fp8", READ_TOO),
        "mutation": (multiplied(after=doubled_in_place), MULTIPLIED, "extra op", PRODUCT, DOUBLED),
        "view that changes meaning": (multiplied(after=heads_mixed), MULTIPLIED, "extra op", PRODUCT, "^permute"),
        "device": CACHE,
        "eps differs": NO_EPS,
        "not the last dim": (
            multiplied(after=lambda x: x.flip(-1)), MULTIPLIED, "extra op", PRODUCT, "^flip"),
        "dtype promotion": (
            multiplied(out=torch.float32, after=lambda x: x.to(torch.bfloat16)), MULTIPLIED, "extra op", PRODUCT,
            "bfloat16"),
        "operand order": "n/a: a product reads its operands in one order",
        "missing cast": (
            multiplied(group=64), MULTIPLIED, "attribute", "quant_fp8_group with group=128", "^group=64"),
    },
}  # fmt: skip
