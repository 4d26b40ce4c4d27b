"""The norm of a layer's output, the add to the residual stream and the norm of the sum become one op
where one provider has kernels for all of them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import Traced, after_passes
from torch import Tensor, nn

import atomc
from atomc import ops, passes
from atomc.compiler.select import Selection
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context

transformers = pytest.importorskip("transformers")
pytest.importorskip("triton")

NAMES = (
    "tidy",
    "rms_norm",
    "add_rms_norm",
    "add_rms_norm_quant",
    "rms_norm_quant",
    "rms_norm_add",
    "unread_sums",
)
FUSED = [p for p in passes.PIPELINE if p.name in NAMES]
T, D = 5, 64
RANDOM = torch.Generator().manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM).bfloat16()


X, R, W, W2 = rand(T, D), rand(T, D), rand(D), rand(D)


def fused(
    function: Callable[..., Any],
    *inputs: Tensor,
    platform: str = "h200",
    providers: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
) -> Traced:
    """The graph after the passes up to the fusion, with the kernels of a platform."""
    options = Options(providers=providers, passes=dict.fromkeys(off, False))
    where = Platform.named(platform)
    context = Context(options, where, first=Selection(options, where, eager=False).first)
    enabled = [p for p in FUSED if p.name not in off]
    traced = after_passes(enabled, function, *inputs, context=context)
    assert traced.error == 0.0
    return traced


def two_norms(x: Tensor, r: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    total = r + ops.rms_norm(x, w, 1e-6, "one_plus")
    return ops.rms_norm(total, w2, 1e-5), total


def test_a_norm_an_add_and_a_norm_become_one_op() -> None:
    assert (
        fused(two_norms, X, R, W, W2).text
        == """\
%0 = rms_norm_add_rms_norm(x, r, w, w2, 1e-06, 1e-05, 'one_plus', 'after', keep_sum=True)
return %0.0, %0.1"""
    )


def test_the_operands_of_the_add_may_be_exchanged() -> None:
    def exchanged(x: Tensor, r: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        total = ops.rms_norm(x, w, 1e-6) + r
        return ops.rms_norm(total, w2, 1e-6), total

    text = fused(exchanged, X, R, W, W2).text
    assert text.startswith("%0 = rms_norm_add_rms_norm(x, r, w, w2, ")


def test_a_sum_that_only_the_norm_reads_is_left_out() -> None:
    text = fused(lambda x, r, w, w2: two_norms(x, r, w, w2)[0], X, R, W, W2).text
    assert "'after', keep_sum=False)\nreturn %0.0" in text


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_norm_and_an_add_become_one_op(norm_first: bool) -> None:
    def added(x: Tensor, r: Tensor, w: Tensor) -> Tensor:
        y = ops.rms_norm(x, w, 1e-6, "before")
        return y + r if norm_first else r + y

    assert (
        fused(added, X, R, W).text
        == """\
%0 = rms_norm_add(x, r, w, 1e-06, 'before')
return %0"""
    )


def test_a_norm_with_a_quantizer_stays_one_op_with_it() -> None:
    def quantized(x: Tensor, r: Tensor, w: Tensor, w2: Tensor) -> tuple[Tensor, ...]:
        y, total = two_norms(x, r, w, w2)
        codes, scales = ops.quant_fp8_per_token(y)
        return codes.float(), scales, total

    report = fused(quantized, X, R, W, W2).report
    assert report.num_ops == {"rms_norm": 1, "add_rms_norm_quant": 1}


def sum_and(change: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor, Tensor], Any]:
    return lambda x, r, w: change(r, ops.rms_norm(x, w, 1e-6))


LEFT_ALONE = {
    "another reader of the norm": (sum_and(lambda r, y: (r + y, y.abs())), R),
    "the norm is returned": (sum_and(lambda r, y: (r + y, y)), R),
    "a scaled addend": (sum_and(lambda r, y: torch.add(r, y, alpha=2)), R),
    "a number is added": (sum_and(lambda r, y: y + 1), R),
    "the norm is added to itself": (sum_and(lambda r, y: y + y), R),
    "a difference": (sum_and(lambda r, y: r - y), R),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_sum_of_a_norm_and_a_residual_is_left_alone(name: str) -> None:
    function, residual = LEFT_ALONE[name]
    traced = fused(function, X, residual, W)
    assert traced.report.num_ops == {"rms_norm": 1} and not traced.report.near


def wide(x: Tensor) -> Tensor:
    return x.repeat(1, 512)


NEAR = {
    "another dtype": (X, R.float(), W, "no kernel for rms_norm_add, triton for"),
    "a residual of one row": (X[:1].repeat(T, 1), R[0], W, "other strides"),
    "other strides": (X, rand(D, T).t(), W, "other strides"),
    "a wide row": (wide(X), wide(R), W.repeat(512), "no kernel for rms_norm_add, triton for"),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_the_kernel_does_not_take_stays_two_ops_and_the_report_says_why(name: str) -> None:
    *inputs, reason = NEAR[name]
    report = fused(sum_and(lambda r, y: r + y), *inputs).report
    assert report.num_ops == {"rms_norm": 1}
    [miss] = report.misses("rms_norm_add")
    assert miss.found.startswith(reason)


@pytest.mark.parametrize(
    ("platform", "providers", "reasons"),
    [
        ("cpu", (), []),  # where Inductor fuses them
        ("gfx950", (), ["triton for rms_norm_add_rms_norm, aiter for what it replaces"]),
        ("gfx950", ("triton",), None),
    ],
)
def test_the_kernels_of_a_provider_without_the_fused_one_stay_what_they_are(
    platform: str, providers: tuple[str, ...], reasons: list[str] | None
) -> None:
    report = fused(two_norms, X, R, W, W2, platform=platform, providers=providers).report
    if reasons is None:
        assert report.num_ops == {"rms_norm_add_rms_norm": 1}
    else:
        assert report.num_ops == {"rms_norm": 1, "add_rms_norm": 1}
        assert [miss.found for miss in report.misses("rms_norm_add")] == reasons


def test_without_the_fusion_of_the_second_norm_the_sum_is_still_fused() -> None:
    report = fused(two_norms, X, R, W, W2, off=("add_rms_norm",)).report
    assert report.num_ops == {"rms_norm_add": 1, "rms_norm": 1}


def tiny(kind: str, **differs: object) -> nn.Module:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 99,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.AutoConfig.for_model(kind, **(sizes | differs))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


STOCK = {
    "gemma2": {"rms_norm": 1, "rms_norm_add_rms_norm": 6},
    "gemma3_text": {"rms_norm": 1, "rms_norm_add_rms_norm": 6},
    "glm4": {"rms_norm": 1, "rms_norm_add_rms_norm": 6},
    "olmo2": {"rms_norm_add": 5, "rms_norm_add_rms_norm": 1},
}


@pytest.mark.parametrize("kind", STOCK)
def test_all_norms_of_outputs_in_stock_models_are_fused(kind: str) -> None:
    model = tiny(kind, **({"head_dim": 16} if kind != "olmo2" else {}))
    ids = torch.arange(T)[None]
    report = atomc.explain(model, ids, use_cache=False, platform="h200")
    of_norms = {name: count for name, count in report.num_ops.items() if name in ALL_NORMS}
    assert of_norms == STOCK[kind] and report.matches["rms_norm_add"] == 6
    assert {choice.chosen for choice in report.kernels if choice.op.startswith("rms_norm_add")} == {
        "triton"
    }


ALL_NORMS = ("rms_norm", "add_rms_norm", "rms_norm_add", "rms_norm_add_rms_norm")


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo2"])
def test_the_fused_graph_of_a_stock_model_computes_what_the_model_does(kind: str) -> None:
    model = tiny(kind)
    options = Options()
    where = Platform.named("h200")
    context = Context(options, where, first=Selection(options, where, eager=False).first)
    enabled = [p for p in passes.PIPELINE if not p.paged and not p.off_by_default]
    traced = after_passes(
        enabled,
        lambda ids: model(ids, use_cache=False).logits,
        torch.arange(T)[None],
        context=context,
    )
    assert traced.report.matches["rms_norm_add"] == 6
    assert traced.error < 0.02
