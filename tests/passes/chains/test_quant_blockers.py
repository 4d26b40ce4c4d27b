"""What keeps a quantizing chain from firing, or its kernel from running: scheme, group, layout and
range, by name.

The other blockers are in test_blockers.py. Also behind a graph break, in a recompile, and where
Inductor takes over.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from kernel_cases.rows import one_process_group
from latent import BIND_LATENT
from latent_blockers import (
    KEYS,
    MULTIPLIED,
    ROTATED,
    H,
    L,
    P,
    R,
    T,
    V,
    latent_attention,
    multiplied,
    rand,
)
from refusals import refusal_text
from rewriting import explained, since
from test_counts import own
from torch import Tensor

import atomc
from atomc import OptionsError, kernels, ops, program
from atomc.compiler.pipeline import register_pass
from atomc.platform import Platform

STRICT = {"strict": True, "glue": "eager"}
X, RESIDUAL, W = rand(6, 64), rand(6, 64), rand(64)
WIDE = torch.empty(2, 70000, dtype=torch.bfloat16, device="meta")
TOO_WIDE = r"triton: rows of 70000( \+ 8)? exceed the limit of 65536"
BY_HAND = "no anchor: the graph has no quant_fp8_group and no quant_fp8_per_token"
OTHER_GROUP = r"it does not support quant_fp8_group like quant_fp8_group\(group=32"
TURNED = r"expected quant_fp8_per_token.* reading .* directly; found permute\(dims=\(-1, -2\)\)"


def shown(results: Any) -> tuple[Tensor, ...]:
    """fp8 as numbers, which can be compared."""
    parts = results if isinstance(results, tuple) else (results,)
    return tuple(part.float() if part.dtype.itemsize == 1 else part for part in parts)


def normed(quantizer: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda x, w: shown(quantizer(ops.rms_norm(x, w, 1e-6)))


def sum_normed(quantizer: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def function(x: Tensor, r: Tensor, w: Tensor) -> Any:
        y, total = ops.add_rms_norm(x, r, w, 1e-6)
        return *shown(quantizer(y)), total

    return function


def reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a sum over processes, which is a result, too."""

    def behind_a_sum(x: Tensor, *others: Tensor) -> Any:
        summed = ops.all_reduce(x, GROUP)
        return *function(summed, *others), summed * 1.5

    def behind_a_sum_and_an_add(x: Tensor, *others: Tensor) -> Any:
        return function(ops.all_reduce(x, GROUP), *others)

    return lambda *given: (behind_a_sum if len(given) == 2 else behind_a_sum_and_an_add)(*given)


def gated(quantizer: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda gate, up: shown(quantizer(ops.silu_and_mul(gate, up)))


def by_hand(y: Tensor) -> Tensor:
    scale = y.float().abs().amax(-1, keepdim=True) / 448
    return (y.float() / scale).to(torch.float8_e4m3fn)


def of_32(y: Tensor) -> Any:
    return ops.quant_fp8_group(y, 32)


def turned(y: Tensor) -> Any:
    return ops.quant_fp8_per_token(y.t())


def padded(columns: int) -> Callable[..., Any]:
    def function(x: Tensor, r: Tensor, w: Tensor) -> Any:
        y, total = ops.add_rms_norm(x, r, w, 1e-6)
        return torch.constant_pad_nd(y, (0, columns)), total

    return function


def int8_keys(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor
) -> Any:
    both = ops.scaled_linear_int8(x, weight, x_scale, weight_scale, out_dtype=k_pe.dtype).view(
        T, H, P + V
    )
    return torch.cat((both[..., :P], k_pe.expand(T, H, R)), -1), both[..., P:] * 1.5


INT8 = (
    torch.ones(T, L, dtype=torch.int8),
    torch.ones(H * (P + V), L, dtype=torch.int8),
    torch.ones(T, 1),
    torch.ones(H * (P + V), 1),
    KEYS[-1],
)


def turned_product(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor
) -> Any:
    product = ops.scaled_linear_fp8(x, weight, x_scale, weight_scale, out_dtype=k_pe.dtype)
    both = product.t().reshape(T, H, P + V)
    return torch.cat((both[..., :P], k_pe.expand(T, H, R)), -1), both[..., P:] * 1.5


def plain_product(
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
    latent = torch.einsum("thp,hlp->thl", q, weight.to(q.dtype))
    return latent_attention()(latent, q_pe, kv_c, k_pe, cos, sin, handle)


@dataclass(frozen=True)
class Cell:
    """A function, and what report.why says of the rewrite; `where`: it fires, and it is the kernel
    there that refuses.
    """

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    why: str
    where: str = ""


BLOCKERS = ("scheme", "group", "layout", "range")
ANY_ROWS, NO_SCALE = "n/a: its tiles take any size", "n/a: nothing is quantized"
GROUP, SQUARE = one_process_group(), rand(64, 64)
SUM_TURNED = (
    r"expected (add_)?rms_norm.* reading all_reduce.* directly; found permute\(dims=\(-1, -2\)\)"
)
TABLE: dict[str, dict[str, Cell | str]] = {
    "rms_norm_quant": {
        "scheme": Cell(normed(by_hand), (X, W), BY_HAND),
        "group": Cell(normed(of_32), (X, W), OTHER_GROUP),
        "layout": Cell(normed(turned), (X, W), TURNED),
        "range": Cell(normed(ops.quant_fp8_per_token), (WIDE, WIDE[0]), TOO_WIDE, "h200"),
    },
    "add_rms_norm_quant": {
        "scheme": Cell(sum_normed(by_hand), (X, RESIDUAL, W), BY_HAND),
        "group": Cell(sum_normed(of_32), (X, RESIDUAL, W), OTHER_GROUP),
        "layout": Cell(sum_normed(turned), (X, RESIDUAL, W), TURNED),
        "range": Cell(sum_normed(ops.quant_fp8_per_token), (WIDE, WIDE, WIDE[0]), TOO_WIDE, "h200"),
    },
    "silu_and_mul_quant": {
        "scheme": Cell(gated(by_hand), (X, RESIDUAL), BY_HAND),
        "group": Cell(gated(of_32), (X, RESIDUAL), OTHER_GROUP),
        "layout": Cell(gated(turned), (X, RESIDUAL), TURNED),
        "range": Cell(gated(ops.quant_fp8_per_token), (WIDE, WIDE), TOO_WIDE, "h200"),
    },
    "add_rms_norm_pad": {
        "scheme": NO_SCALE,
        "group": NO_SCALE,
        "layout": Cell(padded(-8), (X, RESIDUAL, W), "columns to be added, these are -8"),
        "range": Cell(padded(8), (WIDE, WIDE, WIDE[0]), TOO_WIDE, "h200"),
    },
    "allreduce_rms_norm": {
        "scheme": NO_SCALE,
        "group": NO_SCALE,
        "layout": Cell(
            lambda x, w: ops.rms_norm(ops.all_reduce(x, GROUP).t(), w, 1e-6),
            (SQUARE, W),
            SUM_TURNED,
        ),
        "range": Cell(
            lambda x, w: ops.rms_norm(ops.all_reduce(x, GROUP), w, 1e-6),
            (WIDE, WIDE[0]),
            TOO_WIDE,
            "h200",
        ),
    },
    "allreduce_add_rms_norm": {
        "scheme": NO_SCALE,
        "group": NO_SCALE,
        "layout": Cell(
            lambda x, r, w: ops.add_rms_norm(ops.all_reduce(x, GROUP).t(), r, w, 1e-6),
            (SQUARE, SQUARE, W),
            SUM_TURNED,
        ),
        "range": Cell(
            lambda x, r, w: ops.add_rms_norm(ops.all_reduce(x, GROUP), r, w, 1e-6),
            (WIDE, WIDE, WIDE[0]),
            TOO_WIDE,
            "h200",
        ),
    },
    "allreduce_rms_norm_quant": {
        "scheme": Cell(reduced(normed(by_hand)), (X, W), BY_HAND),
        "group": Cell(reduced(normed(of_32)), (X, W), OTHER_GROUP),
        "layout": Cell(reduced(normed(turned)), (X, W), TURNED),
        "range": Cell(reduced(normed(ops.quant_fp8_per_token)), (WIDE, WIDE[0]), TOO_WIDE, "h200"),
    },
    "allreduce_add_rms_norm_quant": {
        "scheme": Cell(reduced(sum_normed(by_hand)), (X, RESIDUAL, W), BY_HAND),
        "group": Cell(reduced(sum_normed(of_32)), (X, RESIDUAL, W), OTHER_GROUP),
        "layout": Cell(reduced(sum_normed(turned)), (X, RESIDUAL, W), TURNED),
        "range": Cell(
            reduced(sum_normed(ops.quant_fp8_per_token)), (WIDE, WIDE, WIDE[0]), TOO_WIDE, "h200"
        ),
    },
    "linear_split_cat": {
        "scheme": Cell(
            int8_keys, INT8, "no anchor: the graph has no linear_mxfp4 and no scaled_linear_fp8"
        ),
        "group": "n/a: the op has one size of blocks",
        "layout": Cell(
            turned_product, KEYS, r"reading scaled_linear_fp8.*; found permute\(dims=\(-1, -2\)\)"
        ),
        "range": ANY_ROWS,
    },
    "mla_rope_kv_write": {
        "scheme": NO_SCALE,
        "group": NO_SCALE,
        "layout": Cell(
            latent_attention(of_k=lambda k: k.transpose(0, 1).reshape(k.shape)),
            ROTATED,
            r"mla_kv_write.* reading rope directly; found permute",
        ),
        "range": ANY_ROWS,
    },
    "bmm_rope_kv_write": {
        "scheme": Cell(
            plain_product, MULTIPLIED, "no anchor: the graph has no bmm_mxfp4 and no scaled_bmm_fp8"
        ),
        "group": Cell(
            multiplied(group=64), MULTIPLIED, "quant_fp8_group with group=128; found group=64"
        ),
        "layout": Cell(
            multiplied(after=lambda x: x.transpose(0, 1).reshape(x.shape)),
            MULTIPLIED,
            r"reading scaled_bmm_fp8.*; found permute",
        ),
        "range": ANY_ROWS,
    },
}
REAL = [
    (rewrite, blocker)
    for rewrite, row in TABLE.items()
    for blocker, cell in row.items()
    if isinstance(cell, Cell)
]


@pytest.mark.rotating(each_case=2)
@pytest.mark.parametrize(("rewrite", "blocker"), REAL)
def test_the_reason_is_the_blocker(rewrite: str, blocker: str) -> None:
    cell = TABLE[rewrite][blocker]
    assert isinstance(cell, Cell) and tuple(TABLE[rewrite]) == BLOCKERS
    with register_pass(BIND_LATENT, before="mla_rope_kv_write"):
        report = (
            atomc.explain(cell.function, *cell.inputs, platform=cell.where, options=STRICT)
            if cell.where
            else explained(cell.function, *cell.inputs, tolerance=1e-2)
        )
    assert report.matches[rewrite] == bool(cell.where)
    assert re.search(cell.why, report.why(rewrite)), report.why(rewrite)


# ---- of the writes into a cache in fp8


def test_a_layout_that_no_reader_of_fp8_has_is_refused_by_name() -> None:
    with pytest.raises(
        OptionsError,
        match=r"option layout='contiguous': no kernel reads and writes it on .*'paged'",
    ):
        program.compile_model(
            own("llama", 1), {**STRICT, "kv_cache_dtype": "fp8", "layout": "contiguous"}
        )


@pytest.mark.parametrize(
    "op", ["kv_write", "rope_kv_write", "qk_norm_rope_kv_write", "paged_attention"]
)
@pytest.mark.parametrize(
    ("scales", "sentence"),
    [
        (torch.ones(2), r"k_scale is torch.float32 \[2\]: expected one number of fp32"),
        (
            torch.ones(1).half(),
            r"k_scale is torch.float16 \[1\]: expected one number of fp32",
        ),
    ],
    ids=["a scale a head", "fp16"],
)
def test_scales_of_another_kind_are_refused_by_name(op: str, scales: Tensor, sentence: str) -> None:
    pytest.importorskip("triton")
    assert kernels.load("triton") is None
    case = next(make for name, make in CASES[op].items() if name.startswith("fp8"))
    [kernel] = [kernel for kernel in ops.REGISTRY[op].kernels if kernel.provider == "triton"]
    arguments = case(Draw(torch.bfloat16))
    assert (
        refusal_text(kernel, Platform.named("h200"), arguments | {"k_scale": None, "v_scale": None})
        is None
    )
    assert re.match(
        sentence,
        refusal_text(kernel, Platform.named("h200"), arguments | {"k_scale": scales}) or "",
    )


# ---- behind a graph break, in a recompile, and where Inductor takes over


def doubled(y: Tensor) -> Any:
    return ops.quant_fp8_per_token(y * 2)


def doubled_keys(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, k_pe: Tensor
) -> Any:
    both = ops.scaled_linear_fp8(x, weight, x_scale, weight_scale, out_dtype=k_pe.dtype) * 2
    both = both.view(-1, H, P + V)
    return torch.cat((both[..., :P], k_pe.expand(-1, H, R)), -1), both[..., P:] * 1.5


BLOCKED = {
    "rms_norm_quant": (
        normed(doubled),
        (X, W),
        r"reading rms_norm.*; found mul\(other=2\).* in between",
    ),
    "silu_and_mul_quant": (
        gated(doubled),
        (X, RESIDUAL),
        r"reading silu_and_mul.*; found mul\(other=2\).* in between",
    ),
    "linear_split_cat": (
        doubled_keys,
        KEYS,
        r"reading scaled_linear_fp8.*; found mul\(other=2\).* in between",
    ),
}


def reasons(
    rewrite: str, function: Callable[..., Any], *calls: tuple[Tensor, ...], **how: Any
) -> list[str]:
    """What each graph that these calls compile says of the rewrite."""
    before = atomc.reports()
    compiled = torch.compile(function, backend="atom", options=STRICT, **how)
    with torch.inference_mode():
        for inputs in calls:
            compiled(*inputs)
    return [report.why(rewrite) for report in since(before)]


@pytest.mark.parametrize("rewrite", BLOCKED)
def test_behind_a_graph_break_the_reason_is_the_same(rewrite: str) -> None:
    function, inputs, why = BLOCKED[rewrite]

    def broken(*given: Tensor) -> Any:
        first = given[0] if given[0].dtype.itemsize == 1 else given[0] + 1
        torch._dynamo.graph_break()
        return function(first, *given[1:])

    assert re.search(why, reasons(rewrite, broken, inputs)[-1])


@pytest.mark.parametrize("rewrite", BLOCKED)
def test_in_a_recompile_the_reason_is_the_same(rewrite: str) -> None:
    function, inputs, why = BLOCKED[rewrite]
    rows = inputs[0].shape[0]
    fewer = tuple(x[:3] if x.shape[0] == rows and x is not W else x for x in inputs)
    found = reasons(rewrite, function, inputs, fewer, dynamic=False)
    assert len(found) == 2 and all(re.search(why, sentence) for sentence in found)


def test_a_chain_that_a_graph_break_cuts_says_where() -> None:
    def cut(x: Tensor, w: Tensor) -> Any:
        y = ops.rms_norm(x, w, 1e-6)
        torch._dynamo.graph_break()
        return shown(ops.quant_fp8_per_token(y))

    before, after = reasons("rms_norm_quant", cut, (X, W))
    assert "broken here: Dynamo ended the graph at test_quant_blockers.py" in before
    assert "no anchor: the graph has no rms_norm" in after


def test_where_inductor_takes_over_it_says_why_the_graph_was_not_treated() -> None:
    compiled = torch.compile(
        normed(ops.quant_fp8_per_token), backend="atom", options={"glue": "eager"}
    )
    compiled(X, W.clone().requires_grad_())
    assert "the graph was not treated: gradients are enabled" in atomc.reports()[-1].why(
        "rms_norm_quant"
    )
