"""Replace composite calls of Dynamo's graph by ops, before AOTAutograd decomposes them.

F.linear, F.embedding, F.rms_norm, F.layer_norm    =>    the op of the same name
F.scaled_dot_product_attention                     =>    attention, with tokens before heads
F.conv2d, F.conv3d of a patch                      =>    linear: the kernel is as large as its input
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, Target

from atomc import ops
from atomc.graph.sizes import known_equal, same_sizes
from atomc.graph.strides import same_strides
from atomc.ops.formats import FLOATS
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired
from atomc.torch_compat.core import is_transformed

# Functions that have several names in torch.fx.
RMS_NORM = (F.rms_norm, torch.rms_norm)
LAYER_NORM = (F.layer_norm, torch.layer_norm)
CONVOLUTIONS = (F.conv2d, F.conv3d, torch.conv2d, torch.conv3d)


def lift(gm: GraphModule, context: Context) -> Outcome:
    """Lift every composite call; one that cannot be lifted stays unchanged, with a note."""
    if _autocasts(gm.graph):
        return Outcome(notes=["autocast is active: composite calls are not lifted"])
    done = Outcome()
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _LIFTERS:
            continue
        op, lifter = _LIFTERS[node.target]
        if any(is_transformed(_fake(x)) for x in node.all_input_nodes):
            continue  # its shapes are those of one batch, and its derivative is the reference's
        if off := context.off_here("lift", node):
            done.off.add(off.pattern)
            continue
        outcome = lifter(gm.graph, node)
        if outcome is None:
            continue
        if isinstance(outcome, str):
            done.notes.append(f"{node.name} ({node.target.__name__}) is not lifted: {outcome}")
            if op is not ops.rms_norm:  # which may be recognized later
                differs = Difference("guard", f"a call that {op.name} computes", outcome, node)
                done.near.append(NearMiss(op.name, "", node, 1, 1, 0, [differs], {node}))
        else:
            done.fired.append(Fired(op.name, node, outcome, {node}))
    gm.recompile()
    return done


def _autocasts(graph: Graph) -> bool:
    entered = any(node.target is torch.amp.autocast_mode._enter_autocast for node in graph.nodes)
    return entered or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _fake(argument: Argument) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, Node) else argument


def _arguments(node: Node, names: tuple[str, ...], **defaults: Argument) -> dict[str, Argument]:
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _replace(node: Node, op: ops.Op, *args: Argument) -> Node:
    """Turn the call into one of the op, in place, so that metadata and readers stay."""
    node.target, node.args, node.kwargs = op.overload, args, {}
    return node


# The attributes of the site, or why the call is not lifted; None for a call that computes something
# else.
Lifted = dict[str, Argument] | str | None


def _linear(graph: Graph, node: Node) -> Lifted:
    arguments = _arguments(node, ("input", "weight", "bias"), bias=None)
    if _fake(arguments["weight"]).dim() != 2:
        return "the weight is not a matrix"
    _replace(node, ops.linear, arguments["input"], arguments["weight"], arguments["bias"])
    return {}


def _embedding(graph: Graph, node: Node) -> Lifted:
    if node.target is torch.embedding:  # which has the weight first, and no max_norm
        arguments = _arguments(node, ("weight", "indices"))
        _replace(node, ops.embedding, arguments["indices"], arguments["weight"])
        return {}
    arguments = _arguments(node, ("input", "weight", "padding_idx", "max_norm"), max_norm=None)
    if arguments["max_norm"] is not None:
        return "max_norm modifies the weight"
    _replace(node, ops.embedding, arguments["input"], arguments["weight"])
    return {}


def _rms_norm(graph: Graph, node: Node) -> Lifted:
    arguments = _arguments(
        node, ("input", "normalized_shape", "weight", "eps"), weight=None, eps=None
    )
    x, weight = _fake(arguments["input"]), _fake(arguments["weight"])
    if (dims := len(_fake(arguments["normalized_shape"]))) != 1:
        return f"it normalises over {dims} dimensions, the op over the last one"
    if weight is None:
        return "it has no weight"
    if weight.dtype != x.dtype or x.dtype not in FLOATS:
        return f"x is {x.dtype}, the weight {weight.dtype}"
    # In 16 bits, torch takes the eps of the dtype in which it computes.
    eps = torch.finfo(torch.float32).eps if arguments["eps"] is None else arguments["eps"]
    if not isinstance(eps, float | int):
        return "eps is not a constant"
    normed = _replace(
        node, ops.rms_norm, arguments["input"], arguments["weight"], float(eps), "before"
    )
    if not same_strides(
        x, dense := _fake(node)
    ):  # torch's is contiguous, that of the op has the strides of x
        normed.meta["example_value"] = torch.empty_like(x)
        with graph.inserting_after(normed):
            copy = graph.call_method("contiguous", (normed,))
        copy.meta = {**normed.meta, "example_value": dense}
        normed.replace_all_uses_with(copy, delete_user_cb=lambda reader: reader is not copy)
    return {"style": "before"}


def _layer_norm(graph: Graph, node: Node) -> Lifted:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    arguments = _arguments(node, names, weight=None, bias=None, eps=1e-5)
    if (dims := len(_fake(arguments["normalized_shape"]))) != 1:
        return f"it normalises over {dims} dimensions, the op over the last one"
    if not isinstance(arguments["eps"], float | int):
        return "eps is not a constant"
    _replace(
        node,
        ops.layer_norm,
        arguments["input"],
        arguments["weight"],
        arguments["bias"],
        float(arguments["eps"]),
    )
    return {}


def _sdpa(graph: Graph, node: Node) -> Lifted:
    """[..., N, T, D] becomes [..., T, N, D]; the transposes usually cancel with others."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments = _arguments(node, names, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)
    q, k = _fake(arguments["query"]), _fake(arguments["key"])
    if arguments["dropout_p"]:
        return "it has dropout"
    if q.dim() < 3:
        return "it has no head dimension"
    if arguments["is_causal"] and not known_equal(q.shape[-2], k.shape[-2]):
        return f"causal with {q.shape[-2]} queries and {k.shape[-2]} keys"
    scale = q.shape[-1] ** -0.5 if arguments["scale"] is None else arguments["scale"]
    if not isinstance(scale, float | int):
        return "its scale is not a constant"
    with graph.inserting_before(node):
        heads_last = [
            _transposed(graph, arguments[name], node) for name in ("query", "key", "value")
        ]
        out = graph.call_function(
            ops.attention.overload,
            (*heads_last, None, arguments["attn_mask"]),
            {"scale": float(scale), "causal": bool(arguments["is_causal"])},
        )
        out.meta = _meta(node)
        back = _restore_strides(graph, _transposed(graph, out, node), _fake(node))
    node.replace_all_uses_with(back)
    graph.erase_node(node)
    return {"causal": bool(arguments["is_causal"]), "mask": arguments["attn_mask"] is not None}


def _restore_strides(graph: Graph, transposed: Node, wanted: Tensor) -> Node:
    """The transposed result of the op, copied if the call of torch returns contiguous heads: a
    program may view them. The copy goes if no reader needs its strides.
    """
    *leading, heads, tokens, width = wanted.shape
    fake = wanted.new_empty((*leading, tokens, heads, width)).transpose(-3, -2)
    transposed.meta["example_value"] = fake
    contiguous = wanted.new_empty(wanted.shape)
    if same_strides(fake, wanted) or not same_strides(wanted, contiguous):
        return transposed
    how: dict[str, Argument] = {"memory_format": torch.contiguous_format}
    copy = graph.call_method("clone", (transposed,), how)
    copy.meta = {**transposed.meta, "example_value": wanted}
    return copy


def _patch(graph: Graph, node: Node) -> Lifted:
    """A convolution [P, C, *size] by a kernel of this size, as in the patch embedding of a vision
    encoder: a product of rows.
    """
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    arguments = _arguments(node, names, bias=None, padding=0, dilation=1, groups=1)
    x, weight = _fake(arguments["input"]), _fake(arguments["weight"])
    if not same_sizes(x.shape[2:], weight.shape[2:]):
        return None
    if (
        arguments["groups"] != 1
        or _any_but(0, arguments["padding"])
        or _any_but(1, arguments["dilation"])
    ):
        return None
    with graph.inserting_before(node):
        rows, matrix = (_flat(graph, arguments[name], node) for name in ("input", "weight"))
        out = graph.call_function(ops.linear.overload, (rows, matrix, arguments["bias"]))
        out.meta = _meta(node)
        for _ in x.shape[2:]:
            out = graph.call_method("unsqueeze", (out, -1))
            out.meta = _meta(node)
    out.meta["example_value"] = _fake(node)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
    return {}


def _meta(node: Node) -> dict[str, Any]:
    """The metadata of a node, without its value."""
    return {key: item for key, item in node.meta.items() if key != "example_value"}


def _any_but(value: int, argument: Argument) -> bool:
    return any(
        each != value for each in (argument if isinstance(argument, list | tuple) else (argument,))
    )


def _flat(graph: Graph, x: Argument, like: Node) -> Node:
    flat = graph.call_method("flatten", (x, 1))
    flat.meta = _meta(like)
    first, *rest = _fake(x).shape
    # Not flatten, which adds a guard for a dynamic size.
    flat.meta["example_value"] = _fake(x).new_empty((first, math.prod(rest)))
    return flat


def _transposed(graph: Graph, x: Argument, like: Node) -> Node:
    transposed = graph.call_function(torch.transpose, (x, -3, -2))
    transposed.meta = _meta(like)
    if isinstance(_fake(x), Tensor):
        transposed.meta["example_value"] = _fake(x).transpose(-3, -2)
    return transposed


def _already(graph: Graph, node: Node) -> Lifted:
    """A call of the op by the model, which counts as a site."""
    return {}


_LIFTERS: dict[Target, tuple[ops.Op, Callable[[Graph, Node], Lifted]]] = {
    F.linear: (ops.linear, _linear),
    **dict.fromkeys((F.embedding, torch.embedding), (ops.embedding, _embedding)),
    **dict.fromkeys(RMS_NORM, (ops.rms_norm, _rms_norm)),
    **dict.fromkeys(LAYER_NORM, (ops.layer_norm, _layer_norm)),
    F.scaled_dot_product_attention: (ops.attention, _sdpa),
    **dict.fromkeys(CONVOLUTIONS, (ops.linear, _patch)),
    **{op.overload: (op, _already) for op in ops.REGISTRY.values()},
}
# The ops that calls of PyTorch become.
LIFTED = sorted({op.name for op, lifter in _LIFTERS.values() if lifter is not _already})
