"""Composite calls in bf16 without rewrites: torch's kernels give eager's bits, others nothing
further from fp32.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import atomc
from atomc.passes import PIPELINE

REWRITES_OFF = {step.name: False for step in PIPELINE}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


X, W, B = normal(2, 23, 64), normal(64, 64) / 8, normal(64)
Q, K, V = normal(3, 2, 4, 23, 16)
ONE_K, ONE_V = normal(2, 2, 1, 23, 16)  # a head for all queries, as Falcon gives it
SEEN, ADDED = torch.ones(23, 23, dtype=torch.bool).tril(), normal(2, 4, 23, 23)

PIECES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": (F.linear, (X, W, B)),
    "linear of one row": (F.linear, (X[0, 0], W, B)),
    "linear over columns": (
        lambda x, w, b: F.linear(x.transpose(1, 2), w, b),
        (X.transpose(1, 2).contiguous(), W, B),
    ),
    "embedding": (lambda ids, w: F.embedding(ids, w), (torch.arange(40).view(2, 20), W)),
    "embedding, weight first": (
        lambda ids, w: torch.embedding(w, ids, -1, False, False),
        (torch.arange(40).view(2, 20), W),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (64,), w, 1e-5), (X, B)),
    "rms_norm with the eps of torch": (lambda x, w: F.rms_norm(x / 50, (64,), w), (X, B)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), (X, B, W[0])),
    "attention": (F.scaled_dot_product_attention, (Q, K, V)),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (Q, K, V),
    ),
    "attention, bool mask": (F.scaled_dot_product_attention, (Q, K, V, SEEN)),
    "attention, added mask": (F.scaled_dot_product_attention, (Q, K, V, ADDED)),
    "attention, fp32 mask": (F.scaled_dot_product_attention, (Q, K, V, ADDED.float())),
    "attention by groups": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
        (Q, ONE_K, ONE_V, ADDED),
    ),
    "vision block": (
        lambda x, w, b: (
            x
            + F.linear(
                F.gelu(F.linear(F.layer_norm(x, (64,), b, b), w, b), approximate="tanh"), w, b
            )
        ),
        (X, W, B),
    ),
    "ALiBi": (
        lambda q, k, bias: torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.7, alpha=0.25).softmax(
            -1
        ),
        (Q.flatten(0, 1), K.flatten(0, 1), ADDED.flatten(0, 1)),
    ),
}


def lifted(function: Callable[..., Tensor], given: tuple[Tensor, ...], **options: Any) -> Tensor:
    compiled = torch.compile(
        function, backend="atom", options={"passes": REWRITES_OFF, "glue": "eager", **options}
    )
    with torch.inference_mode():
        return compiled(*given)


def error(found: Tensor, function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> float:
    """The distance to the function in fp32."""
    truth = function(*(x.float() if x.is_floating_point() else x for x in given))
    return float((found.float() - truth).norm())


@pytest.mark.parametrize("piece", PIECES)
def test_without_rewrites_torchs_kernels_give_the_bits_of_eager(piece: str) -> None:
    function, given = PIECES[piece]
    assert torch.equal(lifted(function, given, providers=("torch",)), function(*given))


@pytest.mark.rotating
@pytest.mark.parametrize("piece", PIECES)
def test_without_rewrites_the_kernels_of_the_platform_are_as_near_to_fp32_as_eager(
    piece: str,
) -> None:
    function, given = PIECES[piece]
    assert error(lifted(function, given), function, given) <= 1.02 * error(
        function(*given), function, given
    )


def test_one_key_head_for_all_queries_is_as_near_to_fp32_as_eagers_fused_attention() -> None:
    """Without enable_gqa eager has no fused kernel for that (Falcon), computes in fp32 and is
    slower.
    """
    given = (Q, ONE_K, ONE_V, ADDED)
    found = lifted(F.scaled_dot_product_attention, given)
    fused = F.scaled_dot_product_attention(Q, ONE_K, ONE_V, ADDED, enable_gqa=True)
    assert error(found, F.scaled_dot_product_attention, given) <= 1.02 * error(
        fused, F.scaled_dot_product_attention, given
    )


def test_a_parameter_times_columns_is_as_near_to_fp32_as_eager() -> None:
    """There eager rounds the product before it adds the bias (RecurrentGemma), and oneDNN once
    behind it.
    """
    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
    x = X.transpose(1, 2).contiguous()
    found = lifted(lambda x: layer(x.transpose(1, 2)), (x,))
    truth = F.linear(x.float().transpose(1, 2), layer.weight.float(), layer.bias.float())
    assert (found.float() - truth).norm() <= 1.02 * (
        layer(x.transpose(1, 2)).float() - truth
    ).norm()
    assert [choice.op for choice in atomc.reports()[-1].kernels] == ["linear"]
