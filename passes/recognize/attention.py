"""Replace attention written out in PyTorch by one op.

    q @ k.T > * scale > (tanh: softcap) > (+ masks) > (cat sinks) > softmax > @ v
 =>
    attention(q, k, v, None, mask, sinks, scale=, causal=, softcap=)

The walk starts at each softmax: upstream to the product of queries and keys, downstream to that
with the values. Both products may be matmul, einsum, bmm or baddbmm; keys and values may be
repeated for groups of queries. Masks that hide exactly the later keys become `causal`, others are
added up.

In 16 bits the model rounds scores and weights, the op only its result; rounding="hf" therefore
keeps the written form. A row whose keys are all hidden by -inf is zero, not NaN.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from atomc import ops
from atomc.graph.canonical import Attr, call, dims_of, readers, spell, value
from atomc.graph.edit import infer, nodes_between
from atomc.graph.expressions import Size, expression
from atomc.graph.mutation import mutated, storage
from atomc.graph.provenance import describe, inherited
from atomc.graph.sizes import known_equal, spell_shape
from atomc.graph.strides import Values, same_strides, spread_strides
from atomc.passes.recognize.causal_mask import Band, constant, visible
from atomc.report.records import MissKind
from atomc.rewriting.graph_pass import Context, Outcome
from atomc.rewriting.matching.near_miss import NearMiss
from atomc.rewriting.matching.pattern import Difference
from atomc.rewriting.rewrite import Fired, remove_dead_nodes

aten = torch.ops.aten
Shape = Sequence[Size]
_LAYOUT = ("view", "clone", "expand", "alias")
_PRODUCTS = ("bmm", "baddbmm")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A float mask hides a key with any value up to this one: exp() of it is zero beside any score.
_HIDES = -1e38


class _Unlike(Exception):
    """The walk ends at a node that attention does not have."""

    def __init__(self, kind: MissKind, expected: str, found: str, node: Node):
        super().__init__(found)
        self.difference = Difference(kind, expected, found, node)


@dataclass
class _Added:
    """A mask added to the scores, times `factor`; or, with `fill`, one that is True for hidden
    keys. at: the scores that it applies to.
    """

    mask: Node
    at: Node
    factor: float = 1.0
    fill: float | None = None


@dataclass
class _Walk:
    """What the walk from a softmax has found so far; scale applies to the product."""

    softmax: Node
    inside: list[Node] = field(default_factory=list)
    scale: float = 1.0
    softcap: float = 0.0
    added: list[_Added] = field(default_factory=list)
    sinks: Node | None = None
    scores: Node | None = None  # the product of queries and keys
    result: Node | None = None  # the product of weights and values


def attention(gm: GraphModule, context: Context) -> Outcome:
    """Replace every softmax between a product of queries and keys and one with values."""
    done = Outcome()
    moved: list[tuple[Node, torch.Tensor]] = []
    for softmax in [node for node in gm.graph.nodes if call(node).op in ("_softmax", "softmax")]:
        walk = _Walk(softmax)
        try:
            _downstream(walk)
            _upstream(walk)
            _check(walk, context)
            done.fired.append(_replace(gm.graph, walk, moved))
        except _Unlike as unlike:
            if _has_product(softmax) or (walk.result is not None and _above(softmax)):
                done.near.append(_near_miss(walk, unlike.difference))
    values = Values(gm.graph)
    for node, before in moved:
        spread_strides(gm.graph, node, before, values)
    remove_dead_nodes(gm.graph)
    return done


def _near_miss(walk: _Walk, difference: Difference) -> NearMiss:
    nodes = {*walk.inside, walk.softmax}
    edits = int(difference.kind not in ("guard", "off"))
    total = len(nodes) + edits
    return NearMiss("attention", "", walk.softmax, len(nodes), total, edits, [difference], nodes)


# ---- downstream: from the softmax to the product with the values


def _downstream(walk: _Walk) -> None:
    """Find the product with the values, and the slice that drops the weights of the sinks."""
    softmax = walk.softmax
    if call(softmax).attrs["dim"] != -1:
        raise _Unlike("attribute", "softmax over keys", spell(softmax), softmax)
    node = softmax
    while True:
        walk.inside.append(node)
        reader = _only_reader(node)
        here = call(reader)
        if here.op in _PRODUCTS:
            break
        if here.op not in (*_LAYOUT, "cast", "permute", "slice"):
            raise _Unlike("extra op", "weights times values", describe(reader), reader)
        if here.op == "permute" and not _moves_ones(reader):
            raise _Unlike("view", "weights [.., N, T, S]", spell(reader), reader)
        node = reader
    walk.result = reader
    if here.op == "baddbmm" or here.operands[0] is not node:
        raise _Unlike("operand order", "weights @ values", describe(reader), reader)
    walk.inside.append(reader)


def _only_reader(node: Node) -> Node:
    found = readers(node)
    for reader in found:
        if reader.op == "output":
            raise _Unlike(
                "extra user", f"no other reader of {describe(node)}", "the graph returns it", node
            )
    if len(found) != 1:
        names = " and ".join(describe(reader) for reader in found) or "none"
        raise _Unlike("extra user", f"one reader of {describe(node)}", names, node)
    return found[0]


# ---- upstream: from the softmax to the product of queries and keys


def _upstream(walk: _Walk) -> None:
    """Find the product, and the scale, softcap, masks and sinks on the way, outermost first."""
    factor, node = 1.0, _without_sinks(walk)
    while call(node).op not in _PRODUCTS:
        walk.inside.append(node)
        here = call(node)
        number = here.attrs.get("other")
        plain = here.op == "cast" and value(node).dtype in _FLOATS
        if plain or here.op in _LAYOUT or (here.op == "permute" and _moves_ones(node)):
            node = here.operands[0]
        elif here.op in ("mul", "div") and len(here.operands) == 1 and _is_number(number):
            factor = factor * number if here.op == "mul" else factor / number
            node = here.operands[0]
        elif here.op == "tanh":
            if walk.softcap or factor <= 0:
                raise _Unlike("other op", "one softcap", describe(node), node)
            walk.softcap, factor, node = factor, 1.0, here.operands[0]
        else:
            node = _without_mask(walk, node, factor)
    walk.inside.append(node)
    walk.scores = node
    here = call(node)
    if here.op == "baddbmm":
        beta, alpha = here.attrs.get("beta", 1), here.attrs.get("alpha", 1)
        if not _is_number(alpha) or not (beta == 0 or _is_number(beta)):
            raise _Unlike("scalar", "constant alpha and beta", spell(node), node)
        if _is_number(beta):
            _refuse_in_softcap(walk, node)
            walk.added.append(_Added(here.operands[0], node, factor * beta))
        factor *= alpha
    walk.scale = factor * (walk.softcap or 1.0)


def _without_sinks(walk: _Walk) -> Node:
    """The scores below the cat with the sinks, and below a subtraction of the largest score, which
    changes nothing.
    """
    node = call(walk.softmax).operands[0]
    while call(node).op in ("cast", "clone") and call(call(node).operands[0]).op in ("sub", "cat"):
        walk.inside.append(node)
        node = call(node).operands[0]
    here = call(node)
    if here.op == "sub" and len(here.operands) == 2:
        source, largest = here.operands
        most = call(largest).operands[0] if call(largest).op == "getitem" else largest
        constant_of_row = known_equal(value(largest).shape[-1], 1)
        if call(most).op not in ("max", "amax") or not constant_of_row:
            raise _Unlike("other op", "scores minus the largest", spell(node), node)
        walk.inside += [node, largest, most]
        node = source
    here = call(node)
    dropped = [node for node in walk.inside if call(node).op == "slice"]
    if bool(dropped) != (here.op == "cat"):
        where = (dropped or [node])[0]
        raise _Unlike("extra op", "sinks that are added and dropped", describe(where), where)
    if here.op != "cat":
        return node
    keys = value(here.operands[0]).shape[-1]
    kept = [call(part).attrs for part in dropped]
    if len(kept) != 1 or (kept[0]["dim"], kept[0]["start"], kept[0]["step"]) != (-1, 0, 1):
        raise _Unlike("attribute", "weights [..., :-1]", spell(dropped[0]), dropped[0])
    if not known_equal(value(dropped[0]).shape[-1], keys):
        raise _Unlike("attribute", "weights [..., :-1]", spell(dropped[0]), dropped[0])
    if here.attrs["dim"] != -1 or len(here.operands) != 2:
        raise _Unlike("other op", "scores and one sink per head", spell(node), node)
    walk.inside.append(node)
    walk.sinks = _per_head(here.operands[1], node)
    return here.operands[0]


def _per_head(sinks: Node, cat: Node) -> Node:
    """The vector [N] that is expanded to [.., N, T, 1]."""
    heads = value(cat).shape[-3]
    source = sinks
    while call(source).op in (*_LAYOUT, "cast") and value(source).dim() != 1:
        if call(source).op == "view":
            shape = value(source).shape
            others = [size for d, size in enumerate(shape) if d != len(shape) - 3]
            if not all(known_equal(size, 1) for size in others):
                break
        source = call(source).operands[0]
    if value(source).dim() != 1 or not known_equal(value(source).shape[0], heads):
        raise _Unlike("view", "sinks [N] expanded to the scores", describe(source), sinks)
    return source


def _is_number(attr: Attr) -> TypeGuard[float]:
    return isinstance(attr, int | float) and math.isfinite(attr) and attr != 0


def _without_mask(walk: _Walk, node: Node, factor: float) -> Node:
    """The scores below a mask, which is noted."""
    here = call(node)
    if here.op == "add" and len(here.operands) == 2 and here.attrs.get("alpha", 1) == 1:
        found = [operand for operand in here.operands if _has_product(operand)]
        if len(found) != 1:
            raise _Unlike("other op", "one product of queries and keys", describe(node), node)
        mask = here.operands[here.operands[0] is found[0]]
        if not value(mask).is_floating_point():
            raise _Unlike("dtype", "a float mask", f"{value(mask).dtype} added", node)
        added = _Added(mask, node, factor)
    elif here.op == "masked_fill":
        fill = here.attrs.get("value")
        fill = constant(here.operands[2]) if len(here.operands) == 3 else fill
        found, added = here.operands[:1], _Added(here.operands[1], node, 1.0, _number(fill))
    elif here.op == "where" and len(here.operands) == 3:
        condition, then, other = here.operands
        filled = constant(then) is not None
        if not filled:
            with node.graph.inserting_before(node):
                condition = _call(node.graph, aten.logical_not.default, condition)
        fill = constant(then if filled else other)
        found, added = [other if filled else then], _Added(condition, node, 1.0, fill)
    else:
        raise _Unlike("extra op", "scale, softcap or mask", describe(node), node)
    if added.fill is not None or here.op != "add":
        limit = torch.finfo(value(node).dtype).min / 2
        if added.fill is None or added.fill > max(limit, _HIDES) or factor < 0:
            hides = f"a mask that fills with {limit:.1e} or less"
            raise _Unlike("scalar", hides, f"{added.fill} in {describe(node)}", node)
    _refuse_in_softcap(walk, node)
    walk.added.append(added)
    return found[0]


def _number(attr: Attr) -> float | None:
    return float(attr) if isinstance(attr, int | float) else None


def _refuse_in_softcap(walk: _Walk, node: Node) -> None:
    if walk.softcap:
        raise _Unlike("other op", "masks after the softcap", describe(node), node)


def _has_product(node: Node, depth: int = 16) -> bool:
    """Whether a node is computed from a batch of products by the ops of a walk."""
    here = call(node)
    if here.op in _PRODUCTS:
        return True
    walked = (*_LAYOUT, "cast", "permute", "mul", "div", "tanh", "add", "sub", "masked_fill")
    inputs = {"where": here.operands[1:], "cat": here.operands[:1], "_softmax": here.operands}
    operands = here.operands if here.op in walked else inputs.get(here.op, [])
    return depth > 0 and any(_has_product(operand, depth - 1) for operand in operands)


def _above(node: Node, depth: int = 16) -> bool:
    """Whether a node is computed from a batch of products, by whatever ops, as first operands."""
    while depth and call(node).operands and call(node).op not in _PRODUCTS:
        node, depth = call(node).operands[0], depth - 1
    return call(node).op in _PRODUCTS


def _moves_ones(permute: Node) -> bool:
    """Whether a permutation only moves dimensions of size 1."""
    dims = dims_of(call(permute).attrs["dims"])
    source = value(call(permute).operands[0]).shape
    wide = [d for d in dims if not known_equal(source[d], 1)]
    return wide == sorted(wide)


# ---- the site


def _check(walk: _Walk, context: Context) -> None:
    """Raise for sizes, readers, writes and options that do not allow the op."""
    inside, scores, result = set(walk.inside), walk.scores, walk.result
    assert result is not None and scores is not None
    *heads, rows, keys = _scores_shape(walk)
    for made, columns in ((scores, keys), (result, value(result).shape[-1])):
        wanted = [math.prod(heads), rows, columns]
        if not all(map(known_equal, value(made).shape, wanted)):
            found = f"{spell_shape(value(made).shape)} of {describe(made)}"
            raise _Unlike("size", spell_shape(wanted), found, made)
    for node in walk.inside:
        for reader in readers(node) if node is not result else ():
            if reader not in inside:
                who = "the graph returns it" if reader.op == "output" else describe(reader)
                raise _Unlike("extra user", f"no other reader of {describe(node)}", who, node)
    read = {storage(operand) for node in inside for operand in node.all_input_nodes}
    node, written = min(inside), list[Node]()
    while node is not result:
        written += [target for target in mutated(node) if storage(target) in read]
        node = node.next
    if written:
        raise _Unlike("mutation", f"{describe(written[0])} unchanged", "it is written", written[0])
    if off := context.off_here("attention", walk.softmax):
        raise _Unlike("off", "attention to be on", off.text, walk.softmax)
    if context.options.rounding == "hf" and value(result).dtype != torch.float32:
        raise _Unlike(
            "guard",
            "a model in float32, or rounding='fp32'",
            f"rounding='hf' keeps scores and weights rounded to {value(result).dtype}",
            walk.softmax,
        )


def _replace(graph: Graph, walk: _Walk, moved: list[tuple[Node, torch.Tensor]]) -> Fired:
    scores, result = walk.scores, walk.result
    assert scores is not None and result is not None
    shape = _scores_shape(walk)
    first = len(call(scores).operands) - 2
    q, k = call(scores).operands[first:]
    v = call(result).operands[1]
    before = result.prev
    with graph.inserting_before(result):
        heads = [
            _heads(graph, q, shape[:-1], swapped=False),
            _heads(graph, k, (*shape[:-2], shape[-1]), swapped=True),
            _heads(graph, v, (*shape[:-2], shape[-1]), swapped=False),
        ]
        dtype = value(result).dtype
        heads = [_uncast(node, dtype) for node in heads]
        for node in heads:
            if value(node).dtype != dtype or dtype not in _FLOATS:
                found = f"{describe(node)} in {value(node).dtype}"
                raise _Unlike("dtype", f"q, k and v in {dtype}", found, result)
        heads[1:] = [_unrepeated(graph, node) for node in heads[1:]]
        if not known_equal(value(heads[1]).shape[-3], value(heads[2]).shape[-3]):
            raise _Unlike("size", "keys and values with as many heads", describe(heads[2]), result)
        band = _band(walk)
        mask = None if band is not None else _mask(graph, walk, shape, dtype)
        tokens_first = [_call(graph, aten.transpose.int, node, -3, -2) for node in heads]
        window = 0 if band is None or band.low == -math.inf else int(1 - band.low)
        causal = band is not None and band.high == 0
        how: dict[str, Argument] = {"scale": walk.scale, "causal": causal}
        how |= {"window": window} if window else {}
        how |= {"softcap": walk.softcap} if walk.softcap else {}
        optional: list[Argument] = [None, mask, walk.sinks]
        while optional and optional[-1] is None:
            optional.pop()
        out = graph.call_function(ops.attention.overload, (*tokens_first, *optional), how)
        infer(out)
        back = _call(graph, aten.transpose.int, out, -3, -2)
        old = _as_seen(result, value(back).shape)
        if old is result:
            back = _reshape(graph, back, value(result).shape)
    made = nodes_between(before, result)
    consumed = tuple(call(node).op for node in walk.inside)
    meta = {**inherited(walk.inside, result, "attention"), "consumed": consumed}
    for node in made:
        node.meta.update(meta)
    old.replace_all_uses_with(back)
    if not same_strides(value(back), value(old)):
        moved.append((back, value(old)))
    attrs: dict[str, Attr] = {"causal": causal, "mask": mask is not None}
    attrs |= {"window": window} if window else {}
    attrs |= {"softcap": walk.softcap} if walk.softcap else {}
    attrs |= {"sinks": True} if walk.sinks is not None else {}
    return Fired("attention", result, attrs, set(walk.inside), made, consumed)


def _scores_shape(walk: _Walk) -> Shape:
    """[.., N, T, S] of the scores, with as many dimensions as the softmax has."""
    shape = list(value(walk.softmax).shape)
    if len(shape) not in (3, 4):
        found = f"rank {len(shape)}"
        raise _Unlike("size", "scores [N, T, S] or [B, N, T, S]", found, walk.softmax)
    shape[-1] = value(walk.scores).shape[-1]  # type: ignore[arg-type]
    return shape


def _call(graph: Graph, target: torch._ops.OpOverload, *args: Argument) -> Node:
    node = graph.call_function(target, args)
    infer(node)
    return node


def _reshape(graph: Graph, node: Node, shape: Shape) -> Node:
    """Symbolic sizes are arguments as nodes; one of them may be -1."""
    known = {
        expression(value(other)): other
        for other in graph.nodes
        if isinstance(value(other), torch.SymInt)
    }
    sizes: list[Argument] = [
        size if isinstance(size, int) else known.get(expression(size), -1) for size in shape
    ]
    if sizes.count(-1) > 1:
        raise _Unlike("size", "sizes of the graph", spell_shape(shape), node)
    return _call(graph, aten.reshape.default, node, sizes)


def _as_seen(result: Node, shape: Shape) -> Node:
    """The only reader of the product, if it is a view of this shape; else the product."""
    found = readers(result)
    same = (
        len(found) == 1
        and call(found[0]).op == "view"
        and value(found[0]).dim() == len(shape)
        and all(map(known_equal, value(found[0]).shape, shape))
    )
    return found[0] if same else result


def _heads(graph: Graph, operand: Node, leading: Shape, swapped: bool) -> Node:
    """An operand of a product as [*leading, D]; swapped: the operand is [.., D, rows]."""
    width = value(operand).shape[-2 if swapped else -1]
    shape, best, turned = [*leading, width], operand, swapped
    for node, is_turned in _unviewed(operand):
        if is_turned == swapped and _same_core(value(node).shape, shape):
            best, turned = node, False
    if turned:
        best = _call(graph, aten.transpose.int, operand, -2, -1)
    same = value(best).dim() == len(shape) and all(map(known_equal, value(best).shape, shape))
    return best if same else _reshape(graph, best, shape)


def _unviewed(node: Node) -> Iterator[tuple[Node, bool]]:
    """The nodes that have the values of a node in another shape, and whether their last two
    dimensions are swapped.
    """
    turned = False
    while True:
        yield node, turned
        here = call(node)
        if here.op == "permute" and not _moves_ones(node):
            if turned or not _swaps_last(node):
                return
            turned = True
        elif here.op not in (*_LAYOUT, "permute") or (
            here.op == "expand" and not _same_core(value(node).shape, value(here.operands[0]).shape)
        ):
            return
        node = here.operands[0]


def _swaps_last(permute: Node) -> bool:
    """Whether a permutation swaps the last two dimensions that are not 1."""
    dims = dims_of(call(permute).attrs["dims"])
    source = value(call(permute).operands[0]).shape
    wide = [d for d in dims if not known_equal(source[d], 1)]
    return len(wide) > 1 and [*wide[:-2], wide[-1], wide[-2]] == sorted(wide)


def _same_core(a: Shape, b: Shape) -> bool:
    """Whether two shapes are equal without their dimensions of size 1."""
    cores = [[size for size in shape if not known_equal(size, 1)] for shape in (a, b)]
    return len(cores[0]) == len(cores[1]) and all(map(known_equal, *cores))


def _uncast(node: Node, dtype: torch.dtype) -> Node:
    """The operand before a cast to fp32, which the op makes itself."""
    here = call(node)
    widened = here.op == "cast" and value(node).dtype == torch.float32
    return here.operands[0] if widened and value(here.operands[0]).dtype == dtype else node


def _unrepeated(graph: Graph, node: Node) -> Node:
    """Keys or values [B, K, S, D] before their repetition to [B, K * G, S, D]."""
    spread = node
    while call(spread).op in ("view", "clone") and value(spread).dim() <= 5:
        spread = call(spread).operands[0]
    if call(spread).op != "expand" or value(spread).dim() != 5 or value(node).dim() != 4:
        return node
    source = call(spread).operands[0]
    once, many, whole = (value(part).shape for part in (source, spread, node))
    group_only = known_equal(once[-3], 1) and all(
        known_equal(once[d], many[d]) for d in (-5, -4, -2, -1)
    )
    kept = all(known_equal(many[a], whole[b]) for a, b in ((-5, -4), (-2, -2), (-1, -1)))
    if not group_only or not kept:
        return node
    inner = call(source).operands[0] if call(source).op == "view" else source
    shape = [once[-5], once[-4], once[-2], once[-1]]
    if value(inner).dim() == 4 and all(map(known_equal, value(inner).shape, shape)):
        return inner
    return _reshape(graph, source, shape)


# ---- masks


def _band(walk: _Walk) -> Band | None:
    """The visible keys, if the masks hide exactly the later keys (and those before a window), or
    none.
    """
    band = Band()
    for added in walk.added:
        seen = visible(added.mask, _HIDES)
        if seen is None or added.factor <= 0:
            return None
        band = band & seen
    causal = band.high == 0 and band.low <= 0
    return band if causal or band == Band() else None


def _mask(graph: Graph, walk: _Walk, shape: Shape, dtype: torch.dtype) -> Node:
    """The sum of all masks, [.., N or 1, T or 1, S]; a single one that fills with -inf is bool."""
    if [added.fill for added in walk.added] == [-math.inf]:
        [added] = walk.added
        return _at_scores(
            graph, _call(graph, aten.logical_not.default, added.mask), added.at, shape
        )
    parts = [
        _at_scores(graph, _float_mask(graph, added, dtype), added.at, shape) for added in walk.added
    ]
    total = parts[0]
    for part in parts[1:]:
        total = _call(graph, aten.add.Tensor, total, part)
    return total


def _float_mask(graph: Graph, added: _Added, dtype: torch.dtype) -> Node:
    if added.fill is None:
        scaled = added.factor != 1.0
        return _call(graph, aten.mul.Tensor, added.mask, added.factor) if scaled else added.mask
    # float16 has no number that hides beside every score.
    dtype = torch.float32 if dtype == torch.float16 else dtype
    hidden = added.fill if added.fill == -math.inf else torch.finfo(dtype).min
    zeros = graph.call_function(
        aten.zeros_like.default, (added.mask,), {"dtype": dtype, "memory_format": None}
    )
    infer(zeros)
    return _call(graph, aten.masked_fill.Scalar, zeros, added.mask, hidden)


def _at_scores(graph: Graph, mask: Node, at: Node, shape: Shape) -> Node:
    """A mask of scores [B * N, T, S] as one of [B, N, T, S]."""
    scores, here = value(at).shape, value(mask).shape
    merged = len(scores) == 3 and len(shape) == 4
    if not all(map(known_equal, scores[-2:], shape[-2:])) or not (
        merged or len(scores) == len(shape)
    ):
        raise _Unlike("size", f"a mask for scores {spell_shape(shape)}", spell_shape(scores), mask)
    if len(here) < 2:
        return _reshape(graph, mask, [1, *here] if here else [1, 1])
    if len(here) < 3 or not merged:
        return mask
    leading = [1, 1] if known_equal(here[0], 1) else list(shape[:2])
    return _reshape(graph, mask, [*leading, *here[1:]])
