"""The graph of a layer for the runtime, with the kernels of a platform that need not be here."""

from collections.abc import Callable
from typing import Any

from rewriting import Traced, after_passes
from torch import Tensor
from torch.fx import Graph, GraphModule

from atomc import passes
from atomc.compiler.select import Selection
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context, Pass
from atomc.rewriting.rewrite import Fired

NAMES = ("tidy", "bind_state", "qk_norm_rope_kv_write", "rope_kv_write", "write_forms")


def paged_graph(
    function: Callable[..., Any], *inputs: Tensor, platform: str, **options: Any
) -> tuple[Traced, Graph]:
    """What becomes of the function, and its graph: norms, rotations and writes are one op, and
    tables halves where a kernel of the platform is for these.
    """
    graphs: list[Graph] = []

    def keep(gm: GraphModule, context: Context) -> list[Fired]:
        graphs.append(gm.graph)
        return []

    where, parsed = Platform.named(platform), Options(**options)
    context = Context(
        parsed,
        where,
        paged=True,
        first=lambda node: Selection(parsed, where, eager=True).first(node),
    )
    chosen = [p for p in passes.PIPELINE if p.name in NAMES]
    traced = after_passes([*chosen, Pass("keep", keep)], function, *inputs, context=context)
    return traced, graphs[-1]
