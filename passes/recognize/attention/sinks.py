"""The sinks of GPT-OSS: one more score per head, which has no value.

cat(scores, sinks) > (- largest) > softmax > [..., :-1]
"""

from torch.fx import Node

from atomc.graph.canonical import call, spell, value
from atomc.graph.provenance import describe
from atomc.graph.sizes import known_equal
from atomc.passes.recognize.attention.products import LAYOUT
from atomc.passes.recognize.attention.walk import Walk
from atomc.rewriting.matching.pattern import Unlike


def strip_sinks(walk: Walk) -> Node:
    """The scores below the cat with the sinks, and below a subtraction of the largest score, which
    changes nothing.
    """
    node = _strip_largest(walk)
    here = call(node)
    dropped = [node for node in walk.inside if call(node).op == "slice"]
    if bool(dropped) != (here.op == "cat"):
        where = (dropped or [node])[0]
        raise Unlike("extra op", "sinks that are added and dropped", describe(where), where)
    if here.op != "cat":
        return node
    scores, *others = here.operands
    if not _drops_last(dropped, scores):
        raise Unlike("attribute", "weights [..., :-1]", spell(dropped[0]), dropped[0])
    if here.attrs["dim"] != -1 or len(others) != 1:
        raise Unlike("other op", "scores and one sink per head", spell(node), node)
    walk.inside.append(node)
    walk.sinks = _per_head(others[0], node)
    return scores


def _strip_largest(walk: Walk) -> Node:
    """The operand of the softmax before the largest score of the row was subtracted."""
    node = call(walk.softmax).operands[0]
    while call(node).op in ("cast", "clone") and call(call(node).operands[0]).op in ("sub", "cat"):
        walk.inside.append(node)
        node = call(node).operands[0]
    here = call(node)
    if here.op != "sub" or len(here.operands) != 2:
        return node
    source, largest = here.operands
    most = call(largest).operands[0] if call(largest).op == "getitem" else largest
    constant_of_row = known_equal(value(largest).shape[-1], 1)
    if call(most).op not in ("max", "amax") or not constant_of_row:
        raise Unlike("other op", "scores minus the largest", spell(node), node)
    walk.inside += [node, largest, most]
    return source


def _drops_last(dropped: list[Node], scores: Node) -> bool:
    """Whether a single slice keeps the weights of the scores."""
    slices = [call(part).attrs for part in dropped]
    return [(attrs["dim"], attrs["start"], attrs["step"]) for attrs in slices] == [
        (-1, 0, 1)
    ] and known_equal(value(dropped[0]).shape[-1], value(scores).shape[-1])


def _per_head(sinks: Node, cat: Node) -> Node:
    """The vector [N] that is expanded to [.., N, T, 1]."""
    heads = value(cat).shape[-3]
    source = sinks
    while call(source).op in (*LAYOUT, "cast") and value(source).dim() != 1:
        if call(source).op == "view":
            shape = value(source).shape
            others = [size for d, size in enumerate(shape) if d != len(shape) - 3]
            if not all(known_equal(size, 1) for size in others):
                break
        source = call(source).operands[0]
    if value(source).dim() != 1 or not known_equal(value(source).shape[0], heads):
        raise Unlike("view", "sinks [N] expanded to the scores", describe(source), sinks)
    return source
