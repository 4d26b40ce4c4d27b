"""How often norms and activations quantize their own result in quantized Llamas, by formula,
whatever the depth.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_counts import STRICT, counted, own, stock
from torch import nn

import atomc
from atomc import program
from atomc.quantization.linear import LinearMethod, QuantizedLinear
from atomc.report.report import Report
from atomc.stock.adapter import wrap_stock

# How a scheme of atomc.quantize quantizes activations. "static" stands for a checkpoint that brings
# their scales.
ACTIVATIONS = {
    "fp8": "fp8_per_token",
    "fp8_per_token": "fp8_per_token",
    "fp8_block": "fp8_group",
    "int8": "int8_per_token",
    "mxfp4": "mxfp4",
    "static": "fp8_static",
}
# Rows of every projection that end at the border of a block of 128, so that all merge.
BLOCKS = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64}


def formula(scheme: str, layers: int) -> dict[str, int]:
    """Each layer quantizes for four products: q, k, v; o; gate, up; down.

    Before the first and the third stands a norm: 2L, one of which, the model's first, has no add
    before it. The norm at the other border, the model's last, is read by lm_head, which is kept as
    it is. Before the fourth stands the activation: L. Before the second stands attention, behind
    which the quantizer stays: L.
    """
    activations = ACTIVATIONS[scheme]
    return {
        "rms_norm": 2 * layers + 1,
        "add_rms_norm": 2 * layers,
        f"rms_norm_quant[{activations}]": 1,
        f"add_rms_norm_quant[{activations}]": 2 * layers - 1,
        f"silu_and_mul_quant[{activations}]": layers,
    }


def quantized(model: nn.Module, scheme: str) -> nn.Module:
    if scheme != "static":
        return atomc.quantize(model, scheme)
    scale = nn.Parameter(torch.full((1,), 0.02), requires_grad=False)
    for layer in atomc.quantize(model, "fp8").modules():
        if isinstance(layer, QuantizedLinear):
            layer.method = LinearMethod(replace(layer.method.scheme, activation="static"))
            layer.register_parameter("input_scale", scale)
    return model


def check(report: Report, scheme: str, layers: int) -> None:
    expected = formula(scheme, layers)
    assert counted(report, expected) == expected
    quantizer = f"quant_{ACTIVATIONS[scheme]}"
    # What is left behind: the quantizers behind attention, and the norm at the end, which joined
    # its add.
    left = {
        name: report.num_ops.get(name, 0)
        for name in ("rms_norm", "add_rms_norm", "silu_and_mul", quantizer)
    }
    assert left == {"rms_norm": 0, "add_rms_norm": 1, "silu_and_mul": 0, quantizer: layers}
    assert (
        sum(
            count for name, count in report.num_ops.items() if "linear" in name and name != "linear"
        )
        == 4 * layers
    )


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("make", "layers", "dynamic"),
    [
        (own, 1, False),
        (own, 2, True),
        (own, 4, False),
        (stock, 1, True),
        (stock, 2, False),
        (stock, 4, True),
    ],
)
def test_an_fp8_llama_follows_the_formula_at_any_depth(
    make: Callable[..., nn.Module], layers: int, dynamic: bool
) -> None:
    model = quantized(make("llama", layers, "cpu"), "fp8")
    check(atomc.explain(model, dynamic=dynamic, options=STRICT), "fp8", layers)


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize(
    ("scheme", "make"), [("fp8_per_token", own), ("int8", stock), ("mxfp4", own), ("static", stock)]
)
def test_every_scheme_follows_it(scheme: str, make: Callable[..., nn.Module]) -> None:
    check(atomc.explain(quantized(make("llama", 2, "cpu"), scheme), options=STRICT), scheme, 2)


@pytest.mark.rotating
def test_blocks_that_end_at_the_border_of_a_projection_follow_it() -> None:
    model = stock("llama", 2, "cpu", **BLOCKS)
    check(atomc.explain(quantized(model, "fp8_block"), options=STRICT), "fp8_block", 2)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("make", "scheme", "cache"),
    [
        (own, "fp8", "auto"),
        (lambda *given: wrap_stock(stock(*given)), "int8", "fp8"),
    ],
    ids=["own", "stock"],
)
def test_in_the_runtime_keys_are_written_quantized_as_well(
    make: Callable[..., nn.Module], scheme: str, cache: str
) -> None:
    model = quantized(make("llama", 2, "cpu"), scheme)
    report = program.compile_model(model, options={**STRICT, "kv_cache_dtype": cache}).report
    check(report, scheme, 2)
    assert report.matches["rope_kv_write"] == 2
    assert report.matches["rope_kv_write[fp8]"] == (2 if cache == "fp8" else 0)
