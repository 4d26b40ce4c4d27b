"""Tokens are quantized before they travel to the experts of other processes."""

from typing import Any

import pytest
import torch
from fake_group import fake_group
from rewriting import rewritten
from torch import Tensor

from atomc import ops, passes
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer

CHOSEN = [p for p in passes.PIPELINE if p.name in ("tidy", "quantizers_before_dispatch")]
PAIR = fake_group(2)
X = torch.randn(3, 256).bfloat16()
IDS = torch.tensor([[0, 1], [3, 2], [1, 3]], dtype=torch.int32)
WEIGHTS = torch.rand(3, 2)
PLACES = torch.tensor([[1, 4, 4, 0], [1, 2, 3, 0]])
SCALE = torch.tensor([0.02])
FP8 = [quantizer for quantizer in QUANTIZERS if quantizer.scheme.startswith("fp8")]


def values(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """fp8 has no equality of its own everywhere."""
    return tuple(x.float() if x.dtype.itemsize == 1 else x for x in results)


def attributes(quantizer: Quantizer, column_major: bool = False) -> dict[str, Any]:
    decided = {name: choice.values[0] for name, choice in quantizer.captured.items()}
    return decided | ({"column_major": column_major} if "column_major" in decided else {})


@pytest.mark.parametrize("quantizer", FP8, ids=lambda quantizer: quantizer.scheme)
def test_codes_and_their_scales_travel(quantizer: Quantizer) -> None:
    def function(
        x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, scale: Tensor
    ) -> tuple[Tensor, ...]:
        tokens, local, kept, _ = ops.dispatch_tokens(x, ids, weights, places, 4, 2, PAIR)
        return *values(quantizer(tokens, scale, **attributes(quantizer))), local, kept

    text = rewritten(CHOSEN, function, X, IDS, WEIGHTS, PLACES, SCALE)
    quantized, sent, *_ = text.splitlines()
    assert quantized.startswith(f"%0 = {quantizer.op.name}(x")
    codes, scales = ("%0", "None") if quantizer.is_static else ("%0.0", "%0.1")
    assert sent.startswith(f"%1 = dispatch_tokens(x={codes}, ids=ids, ")
    assert sent.endswith(f", x_scale={scales})")


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda quantizer: quantizer.scheme)
def test_tokens_that_another_op_reads_travel_as_they_are(quantizer: Quantizer) -> None:
    def function(
        x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, scale: Tensor
    ) -> tuple[Tensor, ...]:
        tokens, *_ = ops.dispatch_tokens(x, ids, weights, places, 4, 2, PAIR)
        return *values(quantizer(tokens, scale, **attributes(quantizer))), tokens * 2

    text = rewritten(CHOSEN, function, X, IDS, WEIGHTS, PLACES, SCALE, matches=0)
    assert "dispatch_tokens(x, " in text


@pytest.mark.parametrize("scheme", ["fp8_static", "fp8_group", "int8_per_token", "mxfp4"])
def test_computed_and_other_scales_are_those_of_the_tokens_that_arrive(scheme: str) -> None:
    [quantizer] = [quantizer for quantizer in QUANTIZERS if quantizer.scheme == scheme]

    def function(
        x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, scale: Tensor
    ) -> tuple[Tensor, ...]:
        tokens, *_ = ops.dispatch_tokens(x, ids, weights, places, 4, 2, PAIR)
        return values(quantizer(tokens, scale * 2, **attributes(quantizer, column_major=True)))

    text = rewritten(CHOSEN, function, X, IDS, WEIGHTS, PLACES, SCALE, matches=0)
    assert "dispatch_tokens(x, " in text
