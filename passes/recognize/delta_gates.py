"""Compute the gates of a gated delta rule in one op (Qwen3-Next, Qwen3.5, OLMo Hybrid).

A_log > to fp32 > exp > neg -------------+- * -> g    -+
a > to fp32 > + dt_bias > softplus ------+             +- gated_delta_rule
b > sigmoid (> * rate_scale) -----------------> beta  -+
 =>
a, b, A_log, dt_bias > delta_gates -+-> g    -+
                                    +-> beta -+- gated_delta_rule
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from atomc import ops
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite


def _pattern(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rate_scale: float | None
) -> tuple[Tensor, Tensor]:
    decay = -A_log.to(torch.float32).exp() * F.softplus(a.to(torch.float32) + dt_bias)
    rate = b.sigmoid()
    return decay, rate if rate_scale is None else rate * rate_scale


def _replacement(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rate_scale: float | None
) -> tuple[Tensor, Tensor]:
    return ops.delta_gates(a, b, A_log, dt_bias, 1.0 if rate_scale is None else rate_scale)


def _example(scaled: bool) -> Example:
    return {
        "a": tensor_example(5, 7),
        "b": tensor_example(5, 7),
        "A_log": tensor_example(7, dtype=OneOf(torch.bfloat16, torch.float32)),
        "dt_bias": tensor_example(7, dtype=OneOf(torch.bfloat16, torch.float32)),
        "rate_scale": 2.0 if scaled else None,
    }


DELTA_GATES = Rewrite(
    "delta_gates",
    _pattern,
    _replacement,
    _example,
    read_together=True,
    needs={"gated_delta_rule": {}},
    cases=[Case("rate_scale", {"scaled": True}), Case("", {"scaled": False})],
)
