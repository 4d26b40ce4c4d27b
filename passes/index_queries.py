"""Quantize the queries of an indexer whose cached keys are in fp8, where a kernel multiplies codes
by codes, as the inference code of DeepSeek-V3.2 does.

    q, weights > paged_index_topk
 =>
    q > quant_fp8_per_token -> codes, scale;  codes, weights * scale > paged_index_topk

A query of a head is rounded to four bits, as its keys are: among keys of nearly equal scores other
ones may be chosen. It runs once per range of token counts, because kernels are chosen for each.
"""

import operator

import torch
from torch.fx import GraphModule

from atomc import ops
from atomc.graph.edit import insert, replace
from atomc.graph.op_call import OpCall, op_call
from atomc.ops.formats import FP8
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten


def index_queries(gm: GraphModule, context: Context) -> Outcome:
    """Replace each paged_index_topk that another kernel serves in fp8; kernels are known per range
    of token counts.
    """
    if context.choose is None:
        return Outcome()
    sites = [
        called
        for node in gm.graph.nodes
        if (called := op_call(node)) is not None
        and called.op is ops.paged_index_topk
        and called.values["index_cache"].dtype in FP8
        and called.values["q"].dtype not in FP8
        and context.off_here("index_queries", node) is None
    ]
    return Outcome([fired for site in sites if (fired := _quantized(site, context)) is not None])


def _quantized(site: OpCall, context: Context) -> Fired | None:
    """The replacement of one site; None if it would get the kernel that it has, or one that waits
    for the device, which is for correctness alone.
    """
    assert context.first is not None
    node, dtype = site.node, site.values["index_cache"].dtype
    before = context.first(node)
    pair = insert(node, ops.quant_fp8_per_token.overload, site["q"], dtype=dtype)
    codes, scale = (insert(node, operator.getitem, pair, i) for i in (0, 1))
    of_head = insert(node, aten.squeeze.dim, scale, -1)
    scaled = insert(node, aten.mul.Tensor, site["weights"], of_head)
    chosen_rows = insert(
        node, ops.paged_index_topk.overload, codes, scaled, *node.args[2:], **node.kwargs
    )
    new_nodes = [pair, codes, scale, of_head, scaled, chosen_rows]
    kernel = context.first(chosen_rows)
    if kernel is None or kernel is before or kernel.syncs:
        for new in reversed(new_nodes):
            new.graph.erase_node(new)
        return None
    replace(node, chosen_rows)
    return Fired("index_queries", node, {}, {node}, new_nodes)
