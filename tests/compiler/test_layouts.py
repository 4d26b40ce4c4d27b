"""The layout of the state: that which the first reader prefers, if all kernels have it."""

from typing import Any

import pytest
import torch
from paged_graph import paged_graph
from torch import Tensor

from atomc import OptionsError, ops
from atomc.compiler.select import Selection
from atomc.graph.op_call import op_call
from atomc.options import Options
from atomc.platform import Platform

BF16, TOKENS, WIDTH = torch.bfloat16, 3, 128
WEIGHT = torch.ones(WIDTH, dtype=BF16)


def layout(
    platform: str = "gfx950",
    style: str = "half",
    norms: bool = True,
    softcap: float = 0.0,
    **options: Any,
) -> str | None:
    """Of the state, in which the kernels of all its readers and writers are."""

    def function(qkv: Tensor, kv: Tensor) -> Tensor:
        q, k, v = qkv.view(TOKENS, -1, WIDTH).split([4, 1, 1], 1)
        cos = sin = torch.ones(TOKENS, 1, WIDTH if style == "neox" else WIDTH // 2, dtype=BF16)
        if norms:
            q, k = ops.qk_norm_rope(q, k, WEIGHT, WEIGHT, cos, sin, 1e-6, rope_style=style)
        else:
            q, k = ops.rope(q, cos, sin, style), ops.rope(k, cos, sin, style)
        return ops.attention(q, k, v, kv, scale=WIDTH**-0.5, softcap=softcap)

    qkv = torch.randn(TOKENS, 6 * WIDTH, dtype=BF16)
    _, graph = paged_graph(function, qkv, ops.kv_state(1, WIDTH), platform=platform, **options)
    selection = Selection(Options(**options), Platform.named(platform), eager=True)
    chosen = selection.fix_layout(list(graph.nodes))
    calls = [node for node in graph.nodes if op_call(node) is not None]
    assert len(calls) == 2
    kernels = [selection.choose(node) for node in calls]
    assert [kernel and kernel.layout for kernel in kernels] == [chosen] * 2
    return chosen


FP8 = {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("options", [{}, FP8])
def test_the_reader_prefers_the_layout_of_its_decode_kernel(
    options: dict[str, Any],
) -> None:
    assert layout(**options) == "shuffled"
    # The kernels for decode steps have no softcap.
    assert layout(softcap=2.0, **options) == "paged"


def test_keys_without_norms_are_shuffled_in_16_bits_only() -> None:
    assert layout(norms=False) == "shuffled"
    assert layout(norms=False, **FP8) == "paged"
    with pytest.raises(OptionsError, match="no kernel reads and writes it on AMD"):
        layout(norms=False, layout="shuffled", **FP8)


def test_a_layout_without_a_fused_write_is_not_chosen() -> None:
    assert layout(style="neox") == "paged"
    with pytest.raises(OptionsError, match="no kernel reads and writes it on AMD"):
        layout(style="neox", layout="shuffled")


def test_an_audit_reads_the_state_by_references() -> None:
    assert layout(audit=True) == "paged"
    assert layout(audit=True, layout="shuffled") == "shuffled"


@pytest.mark.parametrize(("platform", "options"), [("gfx950", {"layout": "paged"}), ("h200", {})])
def test_other_layouts_than_the_first_are_paged(platform: str, options: dict[str, Any]) -> None:
    assert layout(platform, **options) == "paged"
