"""What keeps a rewrite from firing is named: a table of rewrites and blockers, the first reason
asserted in each cell.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from delta_blockers import DELTA_ROWS
from fake_group import fake_group
from kernel_cases.rows import one_process_group
from latent import BIND_LATENT
from latent_blockers import MLA_ROWS, ROWS
from moe_blockers import MOE_ROWS
from rewriting import explained
from torch import Tensor

from atomc import ops, passes
from atomc.compiler.pipeline import register_pass

functional, GROUP, PAIR = torch.ops._c10d_functional, one_process_group(), fake_group(2)
# T tokens, N query heads, K key/value heads, D row width, I inner width, H rotated columns of a
# partial rotation.
T, N, K, D, I, H = 6, 4, 2, 16, 24, 8  # noqa: E741
RANDOM = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM).to(torch.bfloat16)


X, R, W, B = rand(T, D), rand(T, D), rand(D), rand(D)
GATE, UP = rand(T, I), rand(T, I)
Q, KEYS, V, QW, KW, COS, SIN = (
    rand(T, N, D),
    rand(T, K, D),
    rand(T, K, D),
    rand(D),
    rand(D),
    rand(T, 1, D),
    rand(T, 1, D),
)
KV = ops.kv_state(K, D).bfloat16()
NORM = X, W
ADD_NORM = X, R, W
ADD_LAYER_NORM = X, R, W, B
GATED = GATE, UP
ADAPTER = rand(T, I), X, rand(2, D), rand(I, 2)
GATED_NORM = X, R, W
ROPE = Q, COS, SIN
HALF = Q, COS[..., :H], SIN[..., :H]
REPEAT = rand(1, T, N, D), rand(1, K, T, D), rand(1, K, T, D)
QK = Q, KEYS, V, QW, KW, COS, SIN
QK_PAGED = *QK, KV
ROPE_PAGED = Q, KEYS, V, COS, SIN, KV


# ---- the ideas as models write them, with places where a cell puts something in between


def same(x: Tensor) -> Tensor:
    return x


def doubled_in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


def to_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def heads_mixed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def adapted(y: Tensor, x: Tensor, a: Tensor, b: Tensor, read: list[Tensor]) -> Tensor:
    read.append(F.linear(x, a))
    return y + F.linear(read[0], b) * 2.0


def normed(
    x: Tensor,
    w: Tensor,
    eps: float = 1e-6,
    dim: int = -1,
    cast: bool = True,
    before_weight: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    x_f32 = x.float()
    y = x_f32 * torch.rsqrt(x_f32.pow(2).mean(dim, keepdim=True) + eps)
    return w * before_weight(y.to(x.dtype) if cast else y)


def layer_normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, 1e-6)


def written_layer_norm(
    x: Tensor,
    w: Tensor,
    dim: int = -1,
    cast: bool = True,
    before_weight: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    x_f32 = x.float()
    centered = x_f32 - x_f32.mean(dim, keepdim=True)
    y = centered * torch.rsqrt(centered.pow(2).mean(dim, keepdim=True) + 1e-6)
    y = w.float() * before_weight(y)
    return y.to(x.dtype) if cast else y


def layer_norm_with_a_reader(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    kept = []
    return written_layer_norm(x, w, before_weight=lambda y: kept.append(y) or y), kept[0].abs()


def gated_norm(y: Tensor, gate: Tensor) -> Tensor:
    return (y * F.silu(gate.float())).to(gate.dtype)


def sum_normed(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
    return normed(x + r, w)


def quantized(y: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    codes, scales = ops.quant_fp8_per_token(y)
    return codes.float(), scales, *others


def gated_quant_with_a_reader(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    y = F.silu(gate) * up
    return quantized(y, y.abs())


def padded(y: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    return torch.constant_pad_nd(y, (0, 8)), *others


def both_normed(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return normed(total, w), total


def summed(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x, "sum", GROUP))


def gathered(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_gather_into_tensor(x, 2, PAIR))


def joined(x: Tensor, dim: int = -1) -> Tensor:
    return torch.cat(x.chunk(2), dim)


def rotate_half(x: Tensor, dim: int = -1) -> Tensor:
    a, b = x.chunk(2, dim)
    return torch.cat((-b, a), dim)


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, dim: int = -1, between: Callable[[Tensor], Tensor] = same
) -> Tensor:
    return x * cos + between(rotate_half(x, dim)) * sin


def partly_rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    rest: Callable[[Tensor], Tensor] = same,
    between: Callable[[Tensor], Tensor] = same,
    dim: int = -1,
) -> Tensor:
    return torch.cat((between(rotated(x[..., :H], cos, sin)), rest(x[..., H:])), dim)


def repeated(x: Tensor, dim: int = 2) -> Tensor:
    """[B, K, T, D] -> [B, T, N, D]; over dim 2 each head is followed by its copies, over dim 1 by
    the next head.
    """
    shape = list(x.shape)
    shape.insert(dim, N // K)
    return x.unsqueeze(dim).expand(shape).reshape(-1, N, T, D).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None) -> Tensor:
    return ops.attention(q, k, v, kv, scale=0.25)


def qk_attention(
    after_norm: Callable[[Tensor], Tensor] = same,
    after_rope: Callable[[Tensor], Tensor] = same,
    value: Callable[[Tensor], Tensor] = same,
    **k_norm: Any,
) -> Callable[..., Tensor]:
    """Attention behind the q/k norms and the rotation; the keyword arguments go to the norm of
    k.
    """

    def function(q, k, v, qw, kw, cos, sin, kv=None):
        q = rotated(after_norm(normed(q, qw)), cos, sin)
        return attend(q, after_rope(rotated(normed(k, kw, **k_norm), cos, sin)), value(v), kv)

    return function


def rope_attention(
    after_rope: Callable[[Tensor], Tensor] = same,
    value: Callable[[Tensor], Tensor] = same,
    **rotation: Any,
) -> Callable[..., Tensor]:
    """Attention behind the rotation; the keyword arguments go to the rotation of k."""

    def function(q, k, v, cos, sin, kv):
        return attend(
            rotated(q, cos, sin), after_rope(rotated(k, cos, sin, **rotation)), value(v), kv
        )

    return function


# ---- blockers that need more than something in between


def norm_with_a_reader(x, w):
    read = []
    return normed(x, w, before_weight=lambda y: read.append(y) or y), *read


def norm_of_x_that_is_written(x, w):
    x = x.float()
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    x.mul_(2)
    return w * (x * scale).to(w.dtype)


def norm_on_two_devices(x, w):
    return normed(x, w.to("meta"), before_weight=to_meta)


def silu_with_a_reader(gate, up):
    act = F.silu(gate)
    return act * up, act.abs()


def gelu_with_a_reader(gate, up):
    act = F.gelu(gate)
    return act * up, act.abs()


def sigmoid_with_a_reader(gate, up):
    act = torch.sigmoid(gate)
    return act * up, act.abs()


def rope_with_a_reader(x, cos, sin):
    read = []
    return rotated(x, cos, sin, between=lambda half: read.append(half.abs()) or half), *read


def rope_of_x_that_is_written(x, cos, sin):
    x = x.clone()
    straight = x * cos
    x.mul_(2)
    return straight + rotate_half(x) * sin


def rope_on_two_devices(x, cos, sin):
    return (x * cos).to("meta") + (rotate_half(x) * sin).to("meta")


def rope_with_its_difference_the_other_way(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((b * sin - a * cos, b * cos + a * sin), -1)


def partial_with_a_reader(x, cos, sin):
    first = rotated(x[..., :H], cos, sin)
    return torch.cat((first, x[..., H:]), -1), first.abs()


def partial_with_the_rest_first(x, cos, sin):
    return torch.cat((x[..., H:], rotated(x[..., :H], cos, sin)), -1)


def repeat_with_a_reader(q, k, v):
    k = repeated(k)
    return attend(q, k, repeated(v)), k.abs()


def repeat_then_write(q, k, v):
    return attend(q, repeated(k).clone().mul_(2), repeated(v))


def sum_written(x, r, w):
    total = x + r
    read = total.clone()
    return normed(total.mul_(2), w), read


def sum_written_before_layer_norm(x, r, w, b):
    total = x + r
    read = total.clone()
    return layer_normed(total.mul_(2), w, b), read


def qk_with_a_reader(q, k, v, qw, kw, cos, sin):
    q = normed(q, qw)
    return attend(rotated(q, cos, sin), rotated(normed(k, kw), cos, sin), v), q.abs()


def qk_on_two_devices(q, k, v, qw, kw, cos, sin):
    q, k = rotated(normed(q, qw), cos, sin), rotated(normed(k, kw), cos, sin)
    return attend(q.to("meta"), k.to("meta"), v.to("meta"))


def qk_with_cos_and_sin_exchanged_for_k(q, k, v, qw, kw, cos, sin):
    return attend(rotated(normed(q, qw), cos, sin), rotated(normed(k, kw), sin, cos), v)


def qk_write_with_a_reader(q, k, v, qw, kw, cos, sin, kv):
    q, k = rotated(normed(q, qw), cos, sin), rotated(normed(k, kw), cos, sin)
    return attend(q, k, v, kv), k.abs()


def qk_write_of_v_as_keys(q, k, v, qw, kw, cos, sin, kv):
    q, k = rotated(normed(q, qw), cos, sin), rotated(normed(k, kw), cos, sin)
    return attend(q, v, k, kv)


def rope_write_with_a_reader(q, k, v, cos, sin, kv):
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return attend(q, k, v, kv), k.abs()


def rope_write_of_v_as_keys(q, k, v, cos, sin, kv):
    return attend(rotated(q, cos, sin), v, rotated(k, cos, sin), kv)


# ---- the table


@dataclass(frozen=True)
class Cell:
    """A function that the rewrite must leave alone, and the first reason it must give (patterns of
    its sentence).
    """

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    kind: str
    expected: str
    found: str
    of: str = ""  # the earlier rewrite that missed first, if that is the reason


BLOCKERS = (
    "extra user",
    "mutation",
    "view that changes meaning",
    "device",
    "eps differs",
    "not the last dim",
    "dtype promotion",
    "operand order",
    "missing cast",
)
DOUBLED, MOVED, READ_TOO = (
    r"^mul\(other=2\).* in between",
    r"^to\(.*device=meta\).* in between",
    "^abs .* also reads it",
)
OTHER_DIM = "attribute", r"mean with dim=\(-1,\)", r"^dim=\(-2,\)"
NO_CAST = "missing cast", "^a cast to bfloat16", "^mul .* used as it is, in float32"
COMMUTES = "n/a: both operands of each of its ops may change places"
CACHE_DEVICE = "n/a: the caches are made where the keys are"
KEPT, ONE_OPERAND = (
    "n/a: a norm that others read is written too",
    "n/a: a quantizer reads one tensor",
)
MUL_OF_NORM = "mul.* reading rms_norm"
TOTAL_OF_SUMS = "add reading all_reduce"
PAD_OF_ADD, NORM_OF_SUM = (
    "constant_pad_nd.* reading .*add_rms_norm",
    "rms_norm.* reading all_reduce",
)
QUANT_OF_NORM, QUANT_OF_ADD, QUANT_OF_GATED = (
    f"quant_fp8_per_token.* reading .*{op}" for op in ("rms_norm", "add_rms_norm", "silu_and_mul")
)
GATHERED = "split.* reading .*wait_tensor"
NO_EPS, ONE_EPS, NO_CASTS = "n/a: it has no eps", "n/a: it has one eps", "n/a: it has no cast"

TABLE: dict[str, dict[str, Cell | str]] = {
    "layer_norm": {
        "extra user": Cell(layer_norm_with_a_reader, NORM, "extra user", "no other reader of mul", READ_TOO),
        "mutation": Cell(
            lambda x, w: written_layer_norm(x, w, before_weight=doubled_in_place), NORM, "extra op", "mul reading", DOUBLED),
        "view that changes meaning": Cell(
            lambda x, w: written_layer_norm(x, w[: D // 2], before_weight=lambda y: y.view(-1, D // 2)), NORM,
            "extra op", "mul reading mul.* directly", "^view.* in between"),
        "device": Cell(
            lambda x, w: written_layer_norm(x, w.to("meta"), before_weight=to_meta), NORM, "extra op",
            "mul reading mul.* directly", MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(lambda x, w: written_layer_norm(x, w, dim=0), NORM, *OTHER_DIM),
        "dtype promotion": Cell(written_layer_norm, (X, W.float()), "dtype", "`weight` in bfloat16", "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(lambda x, w: written_layer_norm(x, w, cast=False), NORM, *NO_CAST),
    },
    "rms_norm": {
        "extra user": Cell(norm_with_a_reader, NORM, "extra user", "no other reader of cast", "the graph returns it"),
        "mutation": Cell(norm_of_x_that_is_written, NORM, "same value", "the same cast.* here as well", r"mul\(other=2\)"),
        "view that changes meaning": Cell(
            lambda x, w: normed(x, w[: D // 2], before_weight=lambda y: y.view(-1, D // 2)), NORM,
            "extra op", "mul reading cast.* directly", "^view.* in between"),
        "device": Cell(norm_on_two_devices, NORM, "extra op", "mul reading cast.* directly", MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(lambda x, w: normed(x, w, dim=0), NORM, *OTHER_DIM),
        "dtype promotion": Cell(normed, (X.float(), W), "dtype", "`weight` in float32", "bfloat16"),
        "operand order": COMMUTES,
        "missing cast": Cell(lambda x, w: normed(x, w, cast=False), NORM, *NO_CAST),
    },
    "rms_norm_gated": {
        "extra user": Cell(
            lambda g, x, w: (gated_norm(y := normed(x, w), g), y.abs()), GATED_NORM, "extra user",
            "no other reader of rms_norm", READ_TOO),
        "mutation": Cell(
            lambda g, x, w: gated_norm(doubled_in_place(normed(x, w)), g), GATED_NORM, "extra op", MUL_OF_NORM, DOUBLED),
        "view that changes meaning": Cell(
            lambda g, x, w: gated_norm(normed(x, w).view(T * 2, -1), g.view(T * 2, -1)), GATED_NORM, "extra op",
            MUL_OF_NORM, "^view"),
        "device": Cell(
            lambda g, x, w: gated_norm(normed(x, w).to("meta"), g.to("meta")), GATED_NORM, "extra op", MUL_OF_NORM, MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(
            lambda g, x, w: gated_norm(normed(x, w, dim=0), g), GATED_NORM, *OTHER_DIM, of="rms_norm"),
        "dtype promotion": Cell(
            lambda g, x, w: normed(x, w) * F.silu(g.float()), GATED_NORM, "missing cast", "^a cast to bfloat16", "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(
            lambda g, x, w: gated_norm(normed(x, w, cast=False), g), GATED_NORM, *NO_CAST, of="rms_norm"),
    },
    "silu_and_mul": {
        "extra user": Cell(silu_with_a_reader, GATED, "extra user", "no other reader of silu", READ_TOO),
        "mutation": Cell(lambda g, u: F.silu(g).mul_(2) * u, GATED, "extra op", "mul reading silu", DOUBLED),
        "view that changes meaning": Cell(
            lambda g, u: F.silu(g).view(T * 2, -1) * u.view(T * 2, -1), GATED, "extra op", "mul reading silu", "^view"),
        "device": Cell(lambda g, u: F.silu(g).to("meta") * u.to("meta"), GATED, "extra op", "mul reading silu", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: it works element by element",
        "dtype promotion": Cell(
            lambda g, u: F.silu(g) * u, (GATE, UP.float()), "dtype", "`up` in bfloat16 .*of `gate`", "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(lambda g, u: F.silu(g.float()) * u, GATED, "dtype", "`up` in float32", "bfloat16"),
    },
    "sigmoid_and_mul": {
        "extra user": Cell(sigmoid_with_a_reader, GATED, "extra user", "no other reader of sigmoid", READ_TOO),
        "mutation": Cell(lambda g, u: torch.sigmoid(g).mul_(2) * u, GATED, "extra op", "mul reading sigmoid", DOUBLED),
        "view that changes meaning": Cell(
            lambda g, u: torch.sigmoid(g).view(T * 2, -1) * u.view(T * 2, -1), GATED, "extra op", "mul reading sigmoid", "^view"),
        "device": Cell(
            lambda g, u: torch.sigmoid(g).to("meta") * u.to("meta"), GATED, "extra op", "mul reading sigmoid", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: it works element by element",
        "dtype promotion": Cell(
            lambda g, u: torch.sigmoid(g) * u, (GATE, UP.float()), "dtype", "`up` in bfloat16 .*of `gate`", "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(
            lambda g, u: torch.sigmoid(g.float()) * u, GATED, "dtype", "`up` in float32", "bfloat16"),
    },
    "gelu_and_mul": {
        "extra user": Cell(gelu_with_a_reader, GATED, "extra user", "no other reader of gelu", READ_TOO),
        "mutation": Cell(lambda g, u: F.gelu(g).mul_(2) * u, GATED, "extra op", "mul reading gelu", DOUBLED),
        "view that changes meaning": Cell(
            lambda g, u: F.gelu(g).view(T * 2, -1) * u.view(T * 2, -1), GATED, "extra op", "mul reading gelu", "^view"),
        "device": Cell(lambda g, u: F.gelu(g).to("meta") * u.to("meta"), GATED, "extra op", "mul reading gelu", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: it works element by element",
        "dtype promotion": Cell(
            lambda g, u: F.gelu(g) * u, (GATE, UP.float()), "dtype", "`up` in bfloat16 .*of `gate`", "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(lambda g, u: F.gelu(g.float()) * u, GATED, "dtype", "`up` in float32", "bfloat16"),
    },
    "rope": {
        "extra user": Cell(rope_with_a_reader, ROPE, "extra user", "no other reader of cat", READ_TOO),
        "mutation": Cell(
            rope_of_x_that_is_written, ROPE, "same value", r"`x` to be mul\(other=2\).* as elsewhere", "input x"),
        "view that changes meaning": Cell(
            lambda x, c, s: rotated(x, c, s, between=heads_mixed), ROPE, "extra op", "mul.* reading cat.* directly",
            "^permute.* in between"),
        "device": Cell(rope_on_two_devices, ROPE, "extra op", "add.* reading mul.* directly", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": Cell(
            lambda x, c, s: rotated(x, c, s, dim=-2), ROPE, "attribute", "slice with dim=-1", "^dim=-2"),
        "dtype promotion": "n/a: the op promotes as PyTorch does",
        "operand order": Cell(
            rope_with_its_difference_the_other_way, HALF, "operand order", "mul before mul in sub", "exchanged"),
        "missing cast": "n/a: the dtypes of x and of the tables are independent",
    },
    "rope_partial": {
        "extra user": Cell(partial_with_a_reader, HALF, "extra user", "no other reader of rope", READ_TOO),
        "mutation": Cell(
            lambda x, c, s: partly_rotated(x, c, s, between=doubled_in_place), HALF, "extra op", "cat.* reading rope",
            DOUBLED),
        "view that changes meaning": Cell(
            lambda x, c, s: partly_rotated(x, c, s, rest=heads_mixed), HALF, "extra op", "cat.* reading slice", "^permute"),
        "device": Cell(
            lambda x, c, s: partly_rotated(x, c, s, rest=to_meta, between=to_meta), HALF, "extra op", "cat.* reading",
            MOVED),
        "eps differs": NO_EPS,
        "not the last dim": Cell(
            lambda x, c, s: partly_rotated(x, c, s, dim=-2), HALF, "attribute", "cat with dim=-1", "^dim=-2"),
        "dtype promotion": "n/a: the op promotes as PyTorch does",
        "operand order": Cell(
            partial_with_the_rest_first, HALF, "operand order", "rope before slice.* in cat", "exchanged"),
        "missing cast": NO_CASTS,
    },
    "repeat_kv": {
        "extra user": Cell(repeat_with_a_reader, REPEAT, "extra user", "no other reader of permute", READ_TOO),
        "mutation": Cell(
            repeat_then_write, REPEAT, "extra op", "attention.* reading permute", r"mul\(other=2\).* in between"),
        "view that changes meaning": Cell(
            lambda q, k, v: attend(q, repeated(k, dim=1), repeated(v)), REPEAT, "view",
            r"shape \[1, 2, 1, 6, 16\]", r"\[1, 1, 2, 6, 16\]"),
        "device": Cell(
            lambda q, k, v: attend(q.to("meta"), repeated(k).to("meta"), repeated(v).to("meta")), REPEAT, "extra op",
            "attention.* reading permute", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: its dimensions are those of attention",
        "dtype promotion": Cell(
            lambda q, k, v: attend(q, repeated(k), repeated(v.float())), REPEAT, "dtype", "`v` in bfloat16 .*of `q`",
            "float32"),
        "operand order": "n/a: keys and values are repeated alike",
        "missing cast": NO_CASTS,
    },
    "lora_linear": {
        "extra user": Cell(
            lambda y, x, a, b: (adapted(y, x, a, b, read := []), read[0].abs()), ADAPTER, "extra user",
            "no other reader of linear", READ_TOO),
        "mutation": Cell(
            lambda y, x, a, b: y + F.linear(F.linear(x, a).mul_(2), b) * 2.0, ADAPTER, "extra op",
            "linear reading linear", DOUBLED),
        "view that changes meaning": Cell(
            lambda y, x, a, b: y + F.linear(F.linear(x, a).t().reshape(T, -1), b) * 2.0, ADAPTER, "extra op",
            "linear .*reading linear", "^permute"),
        "device": Cell(
            lambda y, x, a, b: y.to("meta") + F.linear(F.linear(x, a).to("meta"), b.to("meta")) * 2.0, ADAPTER,
            "extra op", "linear reading linear", MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: products of rows have one dimension",
        "dtype promotion": Cell(
            lambda y, x, a, b: y + F.linear(F.linear(x.float(), a.float()), b.float()) * 2.0, ADAPTER, "missing cast",
            "^a cast to dtype", "^add .* used as it is, in float32"),
        "operand order": COMMUTES,
        "missing cast": "n/a: a sum that stays in fp32 is the promotion",
    },
    "add_rms_norm": {
        "extra user": "n/a: the sum is a result, anybody may read it",
        "mutation": Cell(sum_written, ADD_NORM, "extra op", "rms_norm.* reading add", DOUBLED),
        "view that changes meaning": Cell(
            lambda x, r, w: normed((x + r).view(T * 2, -1), w[: D // 2]), ADD_NORM, "extra op", "rms_norm.* reading add",
            "^view"),
        "device": Cell(
            lambda x, r, w: normed((x + r).to("meta"), w.to("meta")), ADD_NORM, "extra op", "rms_norm.* reading add",
            MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(lambda x, r, w: normed(x + r, w, dim=0), ADD_NORM, *OTHER_DIM, of="rms_norm"),
        "dtype promotion": Cell(
            lambda x, r, w: normed(x + r, w), (X, R.float(), W.float()), "dtype", "`residual` in bfloat16 .*of `x`",
            "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(lambda x, r, w: normed(x + r, w, cast=False), ADD_NORM, *NO_CAST, of="rms_norm"),
    },
    "add_layer_norm": {
        "extra user": "n/a: the sum is a result, anybody may read it",
        "mutation": Cell(
            sum_written_before_layer_norm, ADD_LAYER_NORM, "extra op", "layer_norm.* reading add", DOUBLED),
        "view that changes meaning": Cell(
            lambda x, r, w, b: layer_normed((x + r).view(T * 2, -1), w[: D // 2], b[: D // 2]), ADD_LAYER_NORM,
            "extra op", "layer_norm.* reading add", "^view"),
        "device": Cell(
            lambda x, r, w, b: layer_normed((x + r).to("meta"), w.to("meta"), b.to("meta")), ADD_LAYER_NORM,
            "extra op", "layer_norm.* reading add", MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(
            lambda x, r, w, b: layer_normed((x + r).transpose(0, 1), w[:T], b[:T]), ADD_LAYER_NORM,
            "extra op", "layer_norm.* reading add", "^permute"),
        "dtype promotion": Cell(
            lambda x, r, w, b: layer_normed(x + r, w, b), (X, R.float(), W.float(), B.float()), "dtype",
            "`residual` in bfloat16 .*of `x`", "float32"),
        "operand order": COMMUTES,
        "missing cast": NO_CASTS,
    },
    "all_reduce": {
        "extra user": Cell(
            lambda x: (functional.wait_tensor(reduced := functional.all_reduce(x, "sum", GROUP)), reduced.abs()),
            (X,), "extra user", "no other reader of .*all_reduce", READ_TOO),
        "mutation": "n/a: what is not waited for cannot be written",
        "view that changes meaning": Cell(
            lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", GROUP).t()), (X,), "extra op",
            "wait_tensor reading .*all_reduce", "^permute"),
        "device": "n/a: what is not waited for cannot be moved",
        "eps differs": NO_EPS,
        "not the last dim": "n/a: a sum over processes has no dimension",
        "dtype promotion": Cell(
            lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", GROUP).float()), (X,), "extra op",
            "wait_tensor reading .*all_reduce", "float32"),
        "operand order": "n/a: a sum over processes reads one tensor",
        "missing cast": Cell(
            lambda x: functional.wait_tensor(functional.all_reduce(x, "max", GROUP)), (X,), "attribute",
            "all_reduce with reduce_op=sum", "reduce_op=max"),
    },
    "all_gather": {
        "extra user": Cell(
            lambda x: (joined(y := gathered(x)), y.abs()), (X,), "extra user", "no other reader of .*wait_tensor", READ_TOO),
        # One row, which a view joins: newer versions of torch write a split of what is mutated as slices.
        "mutation": Cell(
            lambda x: doubled_in_place(gathered(x)).view(1, -1), (X[:1],), "extra op", "view reading .*wait_tensor", DOUBLED),
        "view that changes meaning": Cell(
            lambda x: joined(gathered(x).view(4 * T, -1)), (X,), "size", "`x` with size 1 in dim -2", "^6$"),
        "device": Cell(lambda x: joined(gathered(x).to("meta")), (X,), "extra op", GATHERED, MOVED),
        "eps differs": NO_EPS,
        "not the last dim": Cell(
            lambda x: joined(gathered(x), dim=0), (X,), "attribute", "cat with dim=-1", "dim=-2"),
        "dtype promotion": Cell(lambda x: joined(gathered(x).float()), (X,), "extra op", GATHERED, "float32"),
        "operand order": Cell(
            lambda x: torch.cat(gathered(x).chunk(2)[::-1], -1), (X,), "operand order", "slice.* before slice",
            "the operands exchanged"),
        "missing cast": "n/a: a gather casts nothing",
    },
    "add_rms_norm_pad": {
        "extra user": Cell(
            lambda x, r, w: (*padded(y := sum_normed(x, r, w), x + r), y.abs()), ADD_NORM, "extra user",
            "no other reader of result 0 of add_rms_norm", READ_TOO),
        "mutation": Cell(
            lambda x, r, w: padded(doubled_in_place(sum_normed(x, r, w)), x + r), ADD_NORM, "extra op", PAD_OF_ADD,
            DOUBLED),
        "view that changes meaning": Cell(
            lambda x, r, w: padded(sum_normed(x, r, w).view(T * 2, -1), x + r), ADD_NORM, "extra op", PAD_OF_ADD, "^view"),
        "device": Cell(
            lambda x, r, w: padded(sum_normed(x, r, w).to("meta"), x + r), ADD_NORM, "extra op", PAD_OF_ADD, MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(
            lambda x, r, w: (torch.constant_pad_nd(sum_normed(x, r, w), (0, 0, 0, 2)), x + r), ADD_NORM, "attribute",
            r"constant_pad_nd with pad=\(0, columns\)", r"pad=\(0, 0, 0, 2\)"),
        "dtype promotion": Cell(
            lambda x, r, w: padded(sum_normed(x, r, w).float(), x + r), ADD_NORM, "extra op", PAD_OF_ADD, "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(
            lambda x, r, w: padded(normed(x + r, w, cast=False), x + r), ADD_NORM, *NO_CAST, of="rms_norm"),
    },
    "allreduce_add": {
        "extra user": Cell(
            lambda x, r: (summed(x) + (y := summed(r)), y.abs()), (X, R), "extra user",
            "no other reader of all_reduce", READ_TOO),
        "mutation": Cell(
            lambda x, r: summed(x) + doubled_in_place(summed(r)), (X, R), "extra op", TOTAL_OF_SUMS, DOUBLED),
        "view that changes meaning": Cell(
            lambda x, r: summed(x[:4, :4]) + summed(r[:4, :4]).t(), (X, R), "extra op", TOTAL_OF_SUMS, "^permute"),
        "device": Cell(
            lambda x, r: summed(x).to("meta") + summed(r).to("meta"), (X, R), "extra op", TOTAL_OF_SUMS, MOVED),
        "eps differs": NO_EPS,
        "not the last dim": "n/a: a sum over processes has no dimension",
        "dtype promotion": Cell(
            lambda x, r: summed(x) + summed(r).float(), (X, R), "extra op", TOTAL_OF_SUMS, "float32"),
        "operand order": COMMUTES,
        "missing cast": NO_CASTS,
    },
    "allreduce_add_rms_norm": {
        "extra user": Cell(
            lambda x, r, w: (*both_normed(y := summed(x), r, w), y.abs()), ADD_NORM, "extra user",
            "no other reader of all_reduce", READ_TOO),
        "mutation": Cell(
            lambda x, r, w: both_normed(doubled_in_place(summed(x)), r, w), ADD_NORM, "extra op", NORM_OF_SUM, DOUBLED),
        "view that changes meaning": Cell(
            lambda x, r, w: both_normed(heads_mixed(summed(x)), r, w), ADD_NORM, "extra op", NORM_OF_SUM, "^permute"),
        "device": Cell(
            lambda x, r, w: both_normed(summed(x).to("meta"), r.to("meta"), w.to("meta")), ADD_NORM, "extra op",
            NORM_OF_SUM, MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(lambda x, r, w: normed(summed(x) + r, w, dim=0), ADD_NORM, *OTHER_DIM, of="rms_norm"),
        "dtype promotion": Cell(
            lambda x, r, w: both_normed(summed(x).float(), r.float(), w.float()), ADD_NORM, "extra op", NORM_OF_SUM,
            "float32"),
        "operand order": COMMUTES,
        "missing cast": Cell(lambda x, r, w: normed(summed(x) + r, w, cast=False), ADD_NORM, *NO_CAST, of="rms_norm"),
    },
    "allreduce_rms_norm": {
        "extra user": "n/a: the sum is a result, too",
        "mutation": Cell(
            lambda x, w: normed(doubled_in_place(summed(x)), w), NORM, "extra op", NORM_OF_SUM, DOUBLED),
        "view that changes meaning": Cell(
            lambda x, w: normed(heads_mixed(summed(x)), w), NORM, "extra op", NORM_OF_SUM, "^permute"),
        "device": Cell(
            lambda x, w: normed(summed(x).to("meta"), w.to("meta")), NORM, "extra op", NORM_OF_SUM, MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(lambda x, w: normed(summed(x), w, dim=0), NORM, *OTHER_DIM, of="rms_norm"),
        "dtype promotion": "n/a: the norm reads the sum in whichever dtype it has",
        "operand order": "n/a: a norm reads one tensor",
        "missing cast": Cell(lambda x, w: normed(summed(x), w, cast=False), NORM, *NO_CAST, of="rms_norm"),
    },
    "add_rms_norm_quant": {
        "extra user": KEPT,
        "mutation": Cell(
            lambda x, r, w: quantized(doubled_in_place(sum_normed(x, r, w)), x + r), ADD_NORM, "extra op", QUANT_OF_ADD,
            DOUBLED),
        "view that changes meaning": Cell(
            lambda x, r, w: quantized(sum_normed(x, r, w).view(T * 2, -1), x + r), ADD_NORM, "extra op", QUANT_OF_ADD,
            "^view"),
        "device": Cell(
            lambda x, r, w: quantized(sum_normed(x, r, w).to("meta"), x + r), ADD_NORM, "extra op", QUANT_OF_ADD, MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(
            lambda x, r, w: quantized(normed(x + r, w, dim=0), x + r), ADD_NORM, *OTHER_DIM, of="rms_norm"),
        "dtype promotion": Cell(
            lambda x, r, w: quantized(sum_normed(x, r, w).float(), x + r), ADD_NORM, "extra op", QUANT_OF_ADD, "float32"),
        "operand order": ONE_OPERAND,
        "missing cast": Cell(
            lambda x, r, w: quantized(normed(x + r, w, cast=False), x + r), ADD_NORM, *NO_CAST, of="rms_norm"),
    },
    "rms_norm_quant": {
        "extra user": KEPT,
        "mutation": Cell(
            lambda x, w: quantized(doubled_in_place(normed(x, w))), NORM, "extra op", QUANT_OF_NORM, DOUBLED),
        "view that changes meaning": Cell(
            lambda x, w: quantized(normed(x, w).view(T * 2, -1)), NORM, "extra op", QUANT_OF_NORM, "^view"),
        "device": Cell(lambda x, w: quantized(normed(x, w).to("meta")), NORM, "extra op", QUANT_OF_NORM, MOVED),
        "eps differs": ONE_EPS,
        "not the last dim": Cell(lambda x, w: quantized(normed(x, w, dim=0)), NORM, *OTHER_DIM, of="rms_norm"),
        "dtype promotion": Cell(
            lambda x, w: quantized(normed(x, w).float()), NORM, "extra op", QUANT_OF_NORM, "float32"),
        "operand order": ONE_OPERAND,
        "missing cast": Cell(lambda x, w: quantized(normed(x, w, cast=False)), NORM, *NO_CAST, of="rms_norm"),
    },
    "silu_and_mul_quant": {
        "extra user": Cell(gated_quant_with_a_reader, GATED, "extra user", "no other reader of silu_and_mul", READ_TOO),
        "mutation": Cell(
            lambda g, u: quantized(doubled_in_place(F.silu(g) * u)), GATED, "extra op", QUANT_OF_GATED, DOUBLED),
        "view that changes meaning": Cell(
            lambda g, u: quantized((F.silu(g) * u).view(T * 2, -1)), GATED, "extra op", QUANT_OF_GATED, "^view"),
        "device": Cell(
            lambda g, u: quantized((F.silu(g) * u).to("meta")), GATED, "extra op", QUANT_OF_GATED, MOVED),
        "eps differs": NO_EPS,
        "not the last dim": Cell(
            lambda g, u: quantized((F.silu(g) * u).t()), GATED, "extra op", QUANT_OF_GATED, "^permute"),
        "dtype promotion": Cell(
            lambda g, u: quantized(F.silu(g) * u.float()), GATED, "dtype", "`up` in bfloat16 .*of `gate`", "float32",
            of="silu_and_mul"),
        "operand order": COMMUTES,
        "missing cast": NO_CASTS,
    },
    "qk_norm_rope": {
        "extra user": Cell(qk_with_a_reader, QK, "extra user", "no other reader of rms_norm", READ_TOO),
        "mutation": Cell(
            qk_attention(after_norm=doubled_in_place), QK, "extra op", "rope.* reading rms_norm", DOUBLED),
        "view that changes meaning": Cell(
            qk_attention(after_norm=heads_mixed), QK, "extra op", "rope.* reading rms_norm", "^permute"),
        "device": Cell(qk_on_two_devices, QK, "extra op", "rope.* read together with rope", MOVED),
        "eps differs": Cell(qk_attention(eps=1e-5), QK, "scalar", "one `eps` everywhere", r"^1e-0[56]"),
        "not the last dim": Cell(qk_attention(dim=-2), QK, *OTHER_DIM),
        "dtype promotion": Cell(
            qk_attention(), (*QK[:4], KW.float(), COS, SIN), "dtype", "`k_weight` in bfloat16 .*of `q`", "float32"),
        "operand order": Cell(
            qk_with_cos_and_sin_exchanged_for_k, QK, "operand order", "cos before sin in rope", "exchanged"),
        "missing cast": Cell(qk_attention(cast=False), QK, *NO_CAST),
    },
    "qk_norm_rope_kv_write": {
        "extra user": Cell(
            qk_write_with_a_reader, QK_PAGED, "extra user", "no other reader of result 1 of qk_norm_rope", READ_TOO),
        "mutation": Cell(
            qk_attention(after_rope=doubled_in_place), QK_PAGED, "extra op", "attention.* reading rope", DOUBLED,
            of="qk_norm_rope"),
        "view that changes meaning": Cell(
            qk_attention(after_rope=heads_mixed), QK_PAGED, "extra op", "attention.* reading rope", "^permute",
            of="qk_norm_rope"),
        "device": CACHE_DEVICE,
        "eps differs": Cell(
            qk_attention(eps=1e-5), QK_PAGED, "scalar", "one `eps` everywhere", r"^1e-0[56]", of="qk_norm_rope"),
        "not the last dim": Cell(qk_attention(dim=-2), QK_PAGED, *OTHER_DIM, of="qk_norm_rope"),
        "dtype promotion": Cell(
            qk_attention(value=torch.Tensor.float), QK_PAGED, "dtype", "`v` in bfloat16 .*of `q`", "float32"),
        "operand order": Cell(
            qk_write_of_v_as_keys, QK_PAGED, "operand order", "qk_norm_rope before v in kv_write", "exchanged"),
        "missing cast": Cell(qk_attention(cast=False), QK_PAGED, *NO_CAST, of="qk_norm_rope"),
    },
    "rope_kv_write": {
        "extra user": Cell(rope_write_with_a_reader, ROPE_PAGED, "extra user", "no other reader of rope", READ_TOO),
        "mutation": Cell(
            rope_attention(after_rope=doubled_in_place), ROPE_PAGED, "extra op", "kv_write.* reading rope", DOUBLED),
        "view that changes meaning": Cell(
            rope_attention(after_rope=heads_mixed), ROPE_PAGED, "extra op", "kv_write.* reading rope", "^permute"),
        "device": CACHE_DEVICE,
        "eps differs": NO_EPS,
        "not the last dim": Cell(
            rope_attention(dim=-2), ROPE_PAGED, "attribute", "slice with dim=-1", "^dim=-2"),
        "dtype promotion": Cell(
            rope_attention(value=torch.Tensor.float), ROPE_PAGED, "dtype", "`v` in bfloat16 .*of `q`", "float32"),
        "operand order": Cell(
            rope_write_of_v_as_keys, ROPE_PAGED, "operand order", "rope before v in kv_write", "exchanged"),
        "missing cast": NO_CASTS,
    },
}  # fmt: skip
TABLE |= {
    rewrite: {
        blocker: cell if isinstance(cell, str) else Cell(*cell) for blocker, cell in row.items()
    }
    for rewrite, row in (ROWS | MLA_ROWS | MOE_ROWS | DELTA_ROWS).items()
}


def behind_a_sum(cell: Cell | str, sum_is_read: bool) -> Cell | str:
    """The cell of a norm and a quantizer, whose input is a sum over processes."""
    if isinstance(cell, str):
        return cell

    def function(x: Tensor, *others: Tensor) -> Any:
        y = summed(x)
        found = cell.function(y, *others)
        return (*found, y * 3) if sum_is_read else found

    return replace(cell, function=function)


TABLE |= {
    f"allreduce_{name}": {
        blocker: behind_a_sum(cell, sum_is_read=name == "rms_norm_quant")
        for blocker, cell in TABLE[name].items()
    }
    for name in ("rms_norm_quant", "add_rms_norm_quant")
}
FILES = ("test_blockers.py", "latent_blockers.py", "moe_blockers.py", "delta_blockers.py")
OPTIONAL = {p.name for p in passes.PIPELINE if p.off_by_default}
REAL = {
    rewrite: [blocker for blocker, cell in row.items() if isinstance(cell, Cell)]
    for rewrite, row in TABLE.items()
}
# Per change one blocker of each rewrite, and of the others a third.
CASES = [
    pytest.param(rewrite, blocker, marks=[pytest.mark.rotating(each_case=3)] * (turn > 0))
    for rewrite, blockers in REAL.items()
    for turn, blocker in enumerate(blockers)
]


def test_every_rewrite_has_its_row_and_every_cell_is_a_case_or_says_why_not():
    assert set(TABLE) == {p.name for p in passes.PIPELINE if p.rewrites and not p.cleanup}
    for rewrite, row in TABLE.items():
        assert tuple(row) == BLOCKERS, rewrite
        assert all(isinstance(cell, Cell) or cell.startswith("n/a: ") for cell in row.values())
        assert sum(isinstance(cell, Cell) for cell in row.values()) >= 4, rewrite


@pytest.mark.parametrize(("rewrite", "blocker"), CASES, ids=lambda name: name.replace(" ", "_"))
def test_the_blocked_rewrite_does_not_fire_and_names_the_blocker(rewrite, blocker):
    cell = TABLE[rewrite][blocker]
    if rewrite in ROWS:
        with register_pass(BIND_LATENT, before="mla_rope_kv_write"):
            report = explained(cell.function, *cell.inputs)
    else:
        report = explained(
            cell.function, *cell.inputs, paged=rewrite.endswith("kv_write"), on=OPTIONAL & {rewrite}
        )

    assert not report.matches[rewrite]
    first = report.misses(cell.of or rewrite)[0]
    assert re.search(cell.kind, first.kind) and re.search(cell.expected, first.expected), first
    assert re.search(cell.found, first.found), first
    assert first.source.partition(":")[0] in FILES
    # The one sentence that a user reads says the same, though the reason may lie in an earlier
    # rewrite.
    assert first.text() in report.why(rewrite)
