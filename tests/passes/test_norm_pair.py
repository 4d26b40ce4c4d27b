"""Two norms of products of one input become one op: the norms of DeepSeek's latents, with their
quantizers, and what keeps two norms apart.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes, explained, rewritten
from test_mla_recognition import DENSE
from test_mla_recognition import KINDS as LATENT
from test_moe_models import theirs_of
from test_quant_counts import ACTIVATIONS, quantized
from torch import Tensor, nn

import atomc
from atomc import ops, passes
from atomc.loading.loader import load
from atomc.ops.schemes import SCHEMES
from atomc.passes.fuse.quantizers import QUANTIZERS, Quantizer
from atomc.program import compile_model
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

NAMED = {p.name: p for p in passes.PIPELINE}
PAIRED = [NAMED["tidy"], NAMED["rms_norm_quant"], NAMED["rms_norm_pair"]]
T, Q, L, R = 5, 64, 96, 8
RANDOM = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM).bfloat16()


WHOLE = rand(T, Q + L + R), rand(Q), rand(L)


def latents(
    q: Callable[[Tensor], Any] = lambda y: y,
    kv: Callable[[Tensor], Any] = lambda y: y,
    **of_kv: Any,
) -> Callable[..., Any]:
    """The norms of two ranges of columns, with what reads them; the keyword arguments go to the
    second norm.
    """
    given = {"eps": 1e-6, "style": "after"} | of_kv

    def function(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
        latent = x[..., Q:].split([L, R], -1)[0]
        first = q(ops.rms_norm(x[..., :Q], q_weight, 1e-6))
        second = kv(ops.rms_norm(latent, kv_weight, **given))
        return *_flat(first), *_flat(second)

    return function


def _flat(found: Any) -> tuple[Tensor, ...]:
    """fp8 codes as numbers, which can be compared."""
    parts = found if isinstance(found, tuple) else (found,)
    return tuple(part.float() if part.dtype == torch.float8_e4m3fn else part for part in parts)


def through(quantizer: Quantizer) -> Callable[[Tensor], tuple[Tensor, ...]]:
    scale = torch.tensor([0.02]) if quantizer.is_static else None
    return lambda y: quantizer(y, scale)


def test_the_norms_of_two_ranges_of_columns_become_one_op() -> None:
    assert (
        rewritten(PAIRED, latents(), *WHOLE)
        == """\
%0 = slice(x, 1, 64, 9223372036854775807)
%1 = split_with_sizes(%0, [96, 8], -1)
%2 = slice(x, 1, 0, 64)
%3 = rms_norm_pair(%2, %1.0, q_weight, kv_weight, 1e-06, 'after')
return %3.0, %3.1"""
    )


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=SCHEMES)
@pytest.mark.parametrize("quantized_ones", ["q", "kv", "both"])
def test_either_norm_brings_its_quantizer(quantizer: Quantizer, quantized_ones: str) -> None:
    to = {name: through(quantizer) for name in ("q", "kv") if quantized_ones in (name, "both")}
    text = rewritten(PAIRED, latents(**to), *WHOLE)
    [line] = [line for line in text.splitlines() if "rms_norm" in line]
    assert "rms_norm_pair_quant(" in line and f"scheme='{quantizer.scheme}'" in line
    assert f"quantize_y={quantized_ones == 'both'}, keep_x=False, keep_y=False" in line
    first = "q_weight, kv_weight" if quantized_ones != "kv" else "kv_weight, q_weight"
    assert first in line


@pytest.mark.parametrize(
    ("q_read", "kv_read"), [(True, False), (False, True), (True, True)], ids=str
)
def test_a_quantized_norm_that_is_read_elsewhere_is_kept(q_read: bool, kv_read: bool) -> None:
    def kept(read: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
        return lambda y: (*ops.quant_fp8_per_token(y), *([y] if read else []))

    text = rewritten(PAIRED, latents(q=kept(q_read), kv=kept(kv_read)), *WHOLE)
    assert f"keep_x={q_read}, keep_y={kv_read}" in text


def test_norms_behind_two_linears_of_one_input_become_one_op() -> None:
    def function(x: Tensor, a: Tensor, b: Tensor, a_norm: Tensor, b_norm: Tensor) -> Any:
        first = ops.rms_norm(F.linear(x, a), a_norm, 1e-6)
        return first, ops.rms_norm(F.linear(x, b), b_norm, 1e-6)

    given = rand(T, 32), rand(Q, 32), rand(L, 32), rand(Q), rand(L)
    assert explained(function, *given).matches["rms_norm_pair"] == 1
    report = explained(lambda *rest: function(rest[0].abs(), *rest[1:]), *given)
    assert report.matches["rms_norm_pair"] == 1
    other = explained(lambda x, *rest: (function(x, *rest)[0], function(x + 1, *rest)[1]), *given)
    assert not other.matches["rms_norm_pair"] and not other.misses("rms_norm_pair")


def test_of_three_norms_the_third_stays() -> None:
    def function(x: Tensor, weight: Tensor) -> Any:
        return tuple(ops.rms_norm(part, weight, 1e-6) for part in x.split(Q, -1))

    text = rewritten(PAIRED, function, rand(T, 3 * Q), rand(Q))
    assert text.count("rms_norm_pair(") == text.count("rms_norm(") == 1


def test_what_reads_the_first_norm_may_come_before_the_second() -> None:
    def function(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
        q = ops.rms_norm(x[..., :Q], q_weight, 1e-6).abs().sum(-1)
        return q, ops.rms_norm(x[..., Q : Q + L], kv_weight, 1e-6)

    rewritten(PAIRED, function, *WHOLE, dynamic=True)


def _second_reads_first(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
    first = ops.rms_norm(x[..., :Q], q_weight, 1e-6)
    return first, ops.rms_norm(x[..., Q : Q + L], kv_weight * first.sum(), 1e-6)


def _other_rows(x: Tensor, q_weight: Tensor, kv_weight: Tensor) -> Any:
    first = ops.rms_norm(x[..., :Q], q_weight, 1e-6)
    return first, ops.rms_norm(x[1:, Q : Q + L], kv_weight, 1e-6)


NEAR: dict[str, tuple[Callable[..., Any], str]] = {
    "another eps": (latents(eps=1e-5), "one eps for both norms .first 1e-06.; found 1e-05"),
    "another style": (latents(style="before"), "one style for both norms .*; found before"),
    "another scheme": (
        latents(q=ops.quant_fp8_per_token, kv=ops.quant_mxfp4),
        "one scheme for both norms .first fp8_per_token.; found mxfp4",
    ),
    "another layout of scales": (
        latents(
            q=ops.quant_fp8_group, kv=lambda y: ops.quant_fp8_group(y, column_major_scales=True)
        ),
        "one column_major for both norms",
    ),
    "other rows": (_other_rows, r"rows of \[5, 64\]; found \[4, 96\]"),
    "one reads the other": (_second_reads_first, "do not depend on each other"),
}


@pytest.mark.parametrize("name", NEAR)
def test_norms_that_differ_stay_apart_with_a_reason(name: str) -> None:
    function, reason = NEAR[name]
    report = explained(function, *WHOLE)
    assert not report.matches["rms_norm_pair"]
    assert re.search(reason, report.why("rms_norm_pair")), report.why("rms_norm_pair")


def test_an_option_keeps_them_apart() -> None:
    traced = after_passes(PAIRED, latents(), *WHOLE)
    assert traced.report.matches["rms_norm_pair"] == 1
    report = explained(latents(), *WHOLE, off=["rms_norm_pair"])
    assert not report.matches["rms_norm_pair"]


# ---- in models


# Widths at which blocks of fp8 and groups of MXFP4 end where the latents do.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
STRICT = {"strict": True, "glue": "eager", "cache": False}


def latent_model(name: str, whose: str, layers: int, path: Path) -> nn.Module:
    """Layers without experts, of our file or the stock class."""
    model_type, config = LATENT[name]
    kinds = {"mlp_layer_types": ["dense"] * layers} if "mlp_layer_types" in config else {}
    rank = {"q_lora_rank": None} if config.get("q_lora_rank", 0) is None else {}
    given = DENSE | config | WIDE | rank | kinds | {"num_hidden_layers": layers}
    model = theirs_of(model_type, **given)
    if whose == "stock":
        return wrap_stock(model)
    model.save_pretrained(path)
    return load(path)


def formula(scheme: str | None, layers: int, q_lora: bool) -> dict[str, int]:
    """Each layer merges the projections to the two latents (without q_lora, that of q and that to
    the latent), and gate and up. Of its norms, that before attention and that before the MLP
    quantize for the merged products; all but the model's first have an add before them.
    """
    found = {"merge_linears": layers, "merge_gate_up": layers}
    found["rms_norm_pair"] = layers if q_lora else 0
    if scheme is None:
        return found
    activations = ACTIVATIONS[scheme]
    of_queries = layers if q_lora else 0  # the latent that kv_b_proj multiplies is not quantized
    return found | {
        f"rms_norm_quant[{activations}]": 1 + of_queries,
        f"add_rms_norm_quant[{activations}]": 2 * layers - 1,
        f"rms_norm_pair[{activations}]": found["rms_norm_pair"],
    }


CASES = [
    (name, whose, layers, scheme)
    for name in LATENT
    for whose in ("ours", "stock")
    for layers in (1, 2, 4)
    for scheme in (None, *ACTIVATIONS)
    if (name == "deepseek_v3" or scheme in (None, "fp8_block")) and scheme != "fp8_per_token"
]
FAST = {
    ("deepseek_v3", "ours", 2, None),
    ("deepseek_v3", "stock", 1, "fp8_block"),
    ("deepseek_v3", "ours", 1, "mxfp4"),
    ("deepseek_v3, no q_lora", "stock", 1, None),
    ("glm4_moe_lite", "ours", 1, "fp8_block"),
}


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "whose", "layers", "scheme"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_each_layer_has_one_product_and_one_norm_of_its_latents(
    name: str, whose: str, layers: int, scheme: str | None, tmp_path: Path
) -> None:
    model = latent_model(name, whose, layers, tmp_path)
    if scheme is not None:
        model = quantized(model, scheme)
    report = compile_model(model, STRICT).report
    expected = formula(scheme, layers, q_lora="no q_lora" not in name)
    assert {key: report.matches[key] for key in expected} == expected
    assert report.misses("rms_norm_pair") == [] and report.bugs == []
    pair = "rms_norm_pair" if scheme is None else "rms_norm_pair_quant"
    assert report.num_ops.get(pair, 0) == expected["rms_norm_pair"]
    # The norm of the model's input, and where there is no q_lora that of the latent.
    left = report.num_ops.get("rms_norm", 0) + report.num_ops.get("rms_norm_quant", 0)
    assert left == 1 + layers * (expected["rms_norm_pair"] == 0)


@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_the_model_computes_what_it_did(scheme: str | None, tmp_path: Path) -> None:
    model = latent_model("deepseek_v3", "ours", 2, tmp_path)
    if scheme is not None:
        model = quantized(model, scheme)
    ids, positions = torch.arange(3, 12), torch.arange(9)
    with torch.inference_mode():
        compiled = torch.compile(model, backend="atom", options=STRICT)(ids, positions)
        expected = model(ids, positions)
    assert atomc.reports()[-1].matches["rms_norm_pair"] == 2
    assert (compiled - expected).abs().max() <= 1e-4 * expected.abs().max()
