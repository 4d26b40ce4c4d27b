"""Drop masks of attention that the graph builds from positions alone, where the op needs none.

    attention(q, k, v, None, arange(S) <= arange(T)[:, None], causal=False)
 =>
    attention(q, k, v, None, causal=True)

Masks that are written out are treated where attention is recognized; these are arguments of
F.scaled_dot_product_attention, such as those of transformers without a cache.
"""

import math
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.sizes import known_equal
from atomc.passes.recognize.attention.causal_mask import Band, visible
from atomc.passes.recognize.attention.masks import HIDES
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.matching.pattern import Unlike
from atomc.rewriting.rewrite import Fired


def proven_masks(gm: GraphModule, context: Context) -> Iterator[Fired]:
    """Replace the mask of each attention for which `causal` and `window` say the same, and drop a
    window that is longer than the queries: in the runtime, earlier keys are in the cache.
    """
    for node in gm.graph.find_nodes(op="call_function", target=ops.attention.overload):
        bound = ops.attention.signature.bind(*node.args, **node.kwargs)
        arguments, mask = bound.arguments, bound.arguments.get("mask")
        before = dict(arguments)
        if isinstance(mask, Node) and not arguments.get("causal", True):
            band = _visible_keys(call(node).operands, mask)
            if band is not None:
                arguments |= {"mask": None, "causal": band.high == 0}
                arguments |= {"window": int(1 - band.low)} if band.low > -math.inf else {}
        rows = value(call(node).operands[0]).shape[-3]
        if not context.paged and isinstance(rows, int) and 0 < rows <= arguments.get("window", 0):
            del arguments["window"]
        if arguments != before:
            node.args, node.kwargs = bound.args, bound.kwargs
            yield Fired("proven_masks", node, {}, {node})


def _visible_keys(operands: list[Node], mask: Node) -> Band | None:
    """The visible keys, if these are all keys, or those up to a query, perhaps in a window."""
    rows, keys = (value(operand).shape[-3] for operand in operands[:2])
    try:
        band = visible(mask, mask, HIDES, true_hides=False)
    except Unlike:
        return None
    if band is None or band == Band():
        return band
    if not all(map(known_equal, value(mask).shape[-2:], (rows, keys))):
        return None
    # A row before the window sees no key if there are fewer keys than queries.
    seen = band.low == -math.inf or (band.low <= 0 and known_equal(rows, keys))
    return band if band.high == 0 and seen else None
