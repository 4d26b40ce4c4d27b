"""Downstream: from the softmax to the product of the weights with the values."""

from torch.fx import Node

from atomc.graph.canonical import call, only_reader, readers, spell
from atomc.graph.provenance import describe
from atomc.passes.recognize.attention.products import LAYOUT, PRODUCTS, moves_ones
from atomc.passes.recognize.attention.walk import Unlike, Walk


def product_with_values(walk: Walk) -> Node:
    """The product of the weights with the values. On the way, a slice may drop the weights of the
    sinks.
    """
    node = walk.softmax
    if call(node).attrs["dim"] != -1:
        raise Unlike("attribute", "softmax over keys", spell(node), node)
    while True:
        walk.inside.append(node)
        reader = _reader(node)
        here = call(reader)
        if here.op in PRODUCTS:
            break
        if here.op not in (*LAYOUT, "cast", "permute", "slice"):
            raise Unlike("extra op", "weights times values", describe(reader), reader)
        if here.op == "permute" and not moves_ones(reader):
            raise Unlike("view", "weights [.., N, T, S]", spell(reader), reader)
        node = reader
    if here.op == "baddbmm" or here.operands[0] is not node:
        raise Unlike("operand order", "weights @ values", describe(reader), reader)
    walk.inside.append(reader)
    return reader


def _reader(node: Node) -> Node:
    reader = only_reader(node)
    if reader is not None and reader.op != "output":
        return reader
    if any(reader.op == "output" for reader in readers(node)):
        expected = f"no other reader of {describe(node)}"
        raise Unlike("extra user", expected, "the graph returns it", node)
    names = " and ".join(map(describe, readers(node))) or "none"
    raise Unlike("extra user", f"one reader of {describe(node)}", names, node)
