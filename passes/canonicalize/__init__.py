"""Write what models spell in several ways in one, so that recognition needs one pattern per op.

Only chains that an op may replace are changed. In fp32 a chain changes by a few of its last bits at
most; a rounding to 16 bits in the middle is left out only if `options.rounding` is "fp32".
"""

from torch.fx import GraphModule

from atomc.passes.canonicalize.activations import one_activation
from atomc.passes.canonicalize.rms_norms import one_rms_norm
from atomc.passes.canonicalize.sums import views_before_sums
from atomc.passes.cleanup import share_equal_nodes
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.rewrite import Fired, remove_dead_nodes


def canonicalize(gm: GraphModule, context: Context) -> list[Fired]:
    """Change every chain that looks like RMSNorm or like a gate's activation."""
    keep = context.options.rounding == "hf"
    changed = [
        *views_before_sums(gm.graph),
        *one_rms_norm(gm.graph, keep),
        *one_activation(gm.graph, keep),
    ]
    if changed:
        remove_dead_nodes(gm.graph)
        share_equal_nodes(gm.graph)
    return [Fired("canonicalize", node, {}, {node}) for node in changed]
