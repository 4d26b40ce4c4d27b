"""The mixtures of experts of a graph: how they route, how their weights are stored."""

import math

from torch import Tensor
from torch.fx import GraphModule, Node

from atomc.cost.router import router_of
from atomc.graph.node_record import record_of
from atomc.graph.op_call import OpCall, arguments_of, op_call
from atomc.graph.provenance import layer_of, module_path
from atomc.ops.op_cost import is_of_experts
from atomc.ops.op_traits import Arguments, Kind
from atomc.report.records import MoeLayer


def moe_layers(gm: GraphModule) -> list[MoeLayer]:
    """One for each op of experts, in the order of the graph before lowering."""
    return [
        _moe_layer(called)
        for called in filter(None, map(op_call, gm.graph.nodes))
        if Kind.EXPERTS in called.op.kind
    ]


def _moe_layer(called: OpCall) -> MoeLayer:
    node, args = called.node, called.values
    stored = {name: x for name, x in args.items() if isinstance(x, Tensor) and is_of_experts(name)}
    if weight := called.op.weight_of(args):
        codes, scheme = weight.codes, f"{weight.format}, {weight.scales(args)}"
    else:
        codes, scheme = 1, str(args["w13"].dtype).removeprefix("torch.")
    multiplied = [math.prod(stored[name].shape) * codes for name in ("w13", "w2")]
    biases = [math.prod(x.shape) for name, x in stored.items() if name in ("b13", "b2")]
    path, router = module_path(node), router_of(called["ids"])
    texts = [] if router is None else [_text(router)]
    if shared := record_of(node).shared_experts:
        texts.append(f"{shared} shared")
    return MoeLayer(
        path,
        layer_of(path),
        node.name,
        ", ".join(texts),
        stored["w13"].shape[0],
        args["ids"].shape[-1],
        scheme,
        sum(multiplied) + sum(biases),
        sum(math.prod(x.shape) * x.element_size() for x in stored.values()),
    )


def _text(router: Node) -> str:
    """How a router chooses and weights experts, in the order in which it computes."""
    settings: Arguments = arguments_of(router)
    parts = [settings["score"].replace("_", " ")]
    parts += ["biased choice"] if settings["bias"] is not None else []
    if settings["groups"] > 1:
        best = {"max": "maximum", "top2": "best two"}[settings["group_score"]]
        parts.append(f"{settings['topk_groups']} of {settings['groups']} groups by their {best}")
    parts += ["renormalized"] if settings["renormalize"] else []
    parts += [f"times {settings['scale']:g}"] if settings["scale"] != 1.0 else []
    return ", ".join(parts)
