"""The Triton kernels of experts for few tokens beyond the table of tests/kernels/test_kernels.py: a token
alone and among others, rows of wide experts, what is refused.
"""

import importlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases.draw import Draw
from kernel_cases.experts import full, int4, mxfp4, transposed
from refusals import refusal_text
from torch import Tensor
from torch.testing import assert_close

from atomc import kernels, ops
from atomc.platform import Platform

pytest.importorskip("triton")
assert kernels.load("triton") is None
few = importlib.import_module(
    "atomc.kernels.triton.experts.experts_decode"
)  # only where there is Triton
unquantized = importlib.import_module("atomc.kernels.triton.experts.experts_decode_unquantized")

H200 = Platform.named("h200")
# Where it is a CPU, Triton's interpreter runs.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS: dict[str, Callable[..., dict[str, Any]]] = {
    "moe_experts": full,
    "moe_experts transposed": transposed,
    "moe_experts_w4a16": partial(int4, inner=64, zeros=True),
    "moe_experts_mxfp4": partial(mxfp4, inner=64),
}
OF_TOKENS = ("x", "ids", "weights")


def kernel_of(op: str) -> ops.Kernel:
    [found] = [
        kernel
        for kernel in ops.REGISTRY[op].kernels
        if kernel.provider == "triton" and kernel.tokens == ops.Tokens(1, few.MAX_TOKENS)
    ]
    return found


def of_rows(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    return given | {
        name: given[name][rows] for name in OF_TOKENS if isinstance(given.get(name), Tensor)
    }


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_alone_gets_the_same_bits_as_among_others(name: str) -> None:
    given = FORMATS[name](Draw(torch.bfloat16, DEVICE))
    kernel = kernel_of(name.split()[0]).function
    whole = kernel(**given)
    for rows in (slice(0, 1), slice(3, 5)):
        assert torch.equal(kernel(**of_rows(given, rows)), whole[rows])


@pytest.mark.parametrize(("steps", "width"), [(2, 96), (5, 288)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "moe_experts transposed"])
def test_rows_of_several_steps_are_summed_to_their_end(
    name: str, interleaved: bool, steps: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernel_of(name.split()[0])
    module = importlib.import_module(kernel.function.__module__)
    tile = few.ExpertsFewTile(64 * 256, 64 * 256, 64, 4)
    assert -(-width // tile.up_shape(width)[1]) == steps
    for table in [table for table in vars(module) if table.startswith("EXPERTS_FEW")]:
        monkeypatch.setattr(module, table, SimpleNamespace(choose=lambda *sizes: tile))
    given = {"hidden": width, "inner": width, "tokens": 1, "bias": True}
    made = FORMATS[name](Draw(torch.float32, DEVICE), interleaved=interleaved, **given)
    reference = ops.REGISTRY[kernel.op].reference(**made)
    assert_close(kernel.function(**made), reference, rtol=1e-4, atol=1e-4)


def test_results_of_experts_apart_are_rounded_before_they_are_weighted_as_those_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = full(Draw(torch.bfloat16, DEVICE), k=3, tokens=2)
    together = unquantized.moe_experts(**given)
    tile = unquantized.EXPERTS_FEW.choose(torch.device("cpu"), 1)._replace(apart=True)
    monkeypatch.setattr(unquantized, "EXPERTS_FEW", SimpleNamespace(choose=lambda *sizes: tile))
    assert_close(unquantized.moe_experts(**given), together, rtol=0.01, atol=1e-4)


def test_an_expert_of_another_device_is_neither_read_nor_added() -> None:
    for make in (full, transposed):
        given = make(Draw(torch.float32, DEVICE))
        given["ids"][0] = torch.tensor([len(given["w13"]), -1])
        given["ids"][1, 0] = 2**30
        out = unquantized.moe_experts(**given)
        assert not out[0].any()
        assert_close(out, ops.moe_experts.reference(**given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("op", "experts", "k", "most"),
    [
        ("moe_experts", 128, 8, 8),
        ("moe_experts", 64, 6, 4),
        ("moe_experts", 8, 2, 2),
        ("moe_experts", 2, 2, 1),
        ("moe_experts", 512, 10, 16),
        ("moe_experts_w4a16", 64, 6, 4),
        ("moe_experts_mxfp4", 32, 4, 8),
        ("moe_experts_mxfp4", 2, 2, 1),
    ],
)
def test_they_are_for_as_many_tokens_as_have_experts_of_their_own(
    op: str, experts: int, k: int, most: int
) -> None:
    given = FORMATS[op](Draw(torch.bfloat16), experts=experts, k=k, hidden=64, inner=64)
    assert kernel_of(op).tokens_for(H200, given) == ops.Tokens(1, most)


def halved(tensor: Tensor) -> Tensor:
    """The same shape, with every second column of a tensor twice as wide."""
    return torch.cat((tensor, tensor), -1)[..., ::2]


@pytest.mark.parametrize(
    ("op", "changed", "sentence"),
    [
        ("moe_experts", {"tokens": 17}, "more than 16 tokens"),
        ("moe_experts", {"k": 1, "weight_on_input": True}, "does not support weight_on_input"),
        ("moe_experts", {"activation": "relu"}, "activation 'relu' is not one of"),
        ("moe_experts_w4a16", {"group": 16}, "groups of 16: written for 32, 64 and 128"),
        ("moe_experts_mxfp4", {"activation_format": "fp8"}, "does not support x_scale"),
    ],
)
def test_what_they_do_not_compute_is_refused(op: str, changed: dict, sentence: str) -> None:
    given = FORMATS[op](Draw(torch.bfloat16), **changed)
    assert sentence in refusal_text(kernel_of(op.split()[0]), H200, given)


def test_weights_that_are_contiguous_in_neither_dimension_are_refused() -> None:
    given = full(Draw(torch.bfloat16))
    given["w2"] = halved(given["w2"])
    assert "of both weights are contiguous" in refusal_text(kernel_of("moe_experts"), H200, given)
    given = transposed(Draw(torch.bfloat16))
    sentence = refusal_text(kernel_of("moe_experts"), H200, given)
    assert sentence == "the rows of the weights are contiguous, not their columns"
    packed = FORMATS["moe_experts_mxfp4"](Draw(torch.bfloat16))
    packed["w2_scale"] = halved(packed["w2_scale"])
    sentence = refusal_text(kernel_of("moe_experts_mxfp4"), H200, packed)
    assert sentence == "w2_scale is not contiguous"


@pytest.mark.parametrize("module", ["experts_decode_unquantized", "experts_prefill"])
@pytest.mark.parametrize("activation", ops.experts.ACTIVATIONS)
def test_a_token_that_is_not_a_number_stays_none_under_a_limit(
    activation: str, module: str
) -> None:
    given = full(Draw(torch.bfloat16, DEVICE), activation=activation, limit=2.0)
    given["x"][1] = torch.nan
    kernel = importlib.import_module(f"atomc.kernels.triton.experts.{module}").moe_experts
    by_token = kernel(**given).isnan().all(-1)
    assert by_token.tolist() == [token == 1 for token in range(len(by_token))]
