"""What keeps the gates of a gated delta rule from being one op: a row of tests/passes/chains/test_blockers.py."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops

# T tokens, N heads of K columns.
T, N, K = 6, 4, 8
RANDOM = torch.Generator().manual_seed(0)
HEADS = torch.randn(T, N, K, generator=RANDOM).bfloat16()
A, B = torch.randn(2, T, N, generator=RANDOM).bfloat16()
A_LOG, DT_BIAS = torch.randn(2, N, generator=RANDOM).bfloat16()
GIVEN = HEADS, A, B, A_LOG, DT_BIAS


def same(x: Tensor) -> Tensor:
    return x


def ruled(
    after_decay: Callable[[Tensor], Tensor] = same,
    after_rate: Callable[[Tensor], Tensor] = same,
    cast: bool = True,
) -> Callable[..., Tensor]:
    def function(x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        forget = (a_log.float() if cast else a_log).exp()
        decay = after_decay(-forget * F.softplus(a.float() + dt_bias))
        return ops.gated_delta_rule(x, x, x, decay, after_rate(b.sigmoid()), scale=0.25)

    return function


def read_too(x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
    time = F.softplus(a.float() + dt_bias)
    decay = -a_log.float().exp() * time
    return ops.gated_delta_rule(x, x, x, decay, b.sigmoid(), scale=0.25), time.abs()


def heads_mixed(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape)


TOGETHER = r"mul .* read together with sigmoid"
DELTA_ROWS = {
    "delta_gates": {
        "extra user": (read_too, GIVEN, "extra user", "no other reader of softplus", "abs"),
        "mutation": (
            ruled(after_decay=lambda g: g.mul_(2)), GIVEN, "extra op", TOGETHER, r"^mul\(other=2\)"),
        "view that changes meaning": (
            ruled(after_decay=heads_mixed), GIVEN, "extra op", TOGETHER, "^permute"),
        "device": "n/a: a gated delta rule has its gates on its device",
        "eps differs": "n/a: it has no eps",
        "not the last dim": "n/a: it works element by element",
        "dtype promotion": (
            ruled(), (HEADS, A, B.float(), A_LOG, DT_BIAS), "dtype", "`b` in bfloat16 .*of `a`", "float32"),
        "operand order": "n/a: both operands of each of its ops may change places",
        "missing cast": (
            ruled(cast=False), GIVEN, "missing cast", "^a cast to float32", "a_log used as it is, in bfloat16"),
    }
}  # fmt: skip
