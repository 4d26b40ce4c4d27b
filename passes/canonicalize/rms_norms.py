"""One spelling of RMSNorm: x_f32 * rsqrt(mean(x_f32 ** 2, -1, keepdim=True) + eps).

sum(x^2) * (1 / n), sum(x^2) / n              =>    mean(x^2)
mean > + eps > rsqrt > unsqueeze              =>    mean(keepdim) > + eps > rsqrt
1 / sqrt(v), v ** -0.5                        =>    rsqrt(v)
x / sqrt(v)                                   =>    x * rsqrt(v)
x * rsqrt(v), x in 16 bits                    =>    x_f32 * rsqrt(v)
x * round(rsqrt(v))                           =>    round(x_f32 * rsqrt(v))
x_f32 * rsqrt(v) * to_fp32(w)                 =>    x_f32 * rsqrt(v) * w
x_f32 * rsqrt(v), without a weight            =>    x_f32 * rsqrt(v) * ones
norm(s), s = a_f32 + b_f32, s in 16 bits      =>    norm(s_f32), s = a + b, s

v is always in fp32. Exact, up to the last bits in fp32 of mean, root and division, except the lines
with a rounding, which are left as they are if roundings are kept. The last one is the residual norm
of vLLM, whose kernels round the sum before they normalize it, too.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from atomc.graph.canonical import call, factor, only_reader, uncast, value
from atomc.graph.edit import infer, insert, replace
from atomc.graph.sizes import same_sizes
from atomc.ops.formats import HALVES

aten = torch.ops.aten
# Element-wise ops that may come between the mean and the dimension that it gets back.
_MOVABLE = frozenset({"add", "rsqrt", "sqrt", "reciprocal", "pow", "mul", "div"})
# Ops of one operand that may come between the normalized row and the product with its weight.
_BEFORE_WEIGHT = frozenset({"view", "cast", "to", "clone", "mul", "permute", "expand"})


def one_rms_norm(graph: Graph, keep_roundings: bool) -> list[Node]:
    """Change every norm in the graph. Returns the products and reductions that were changed."""
    changed: list[Node] = []
    for node in list(graph.nodes):
        if _is_of_squares(node):
            _one_norm(node, keep_roundings, changed)
    return changed


def _is_of_squares(node: Node) -> bool:
    """Whether it is sum(x^2) or mean(x^2) over the last dimension, in fp32."""
    here = call(node)
    return (
        here.op in ("mean", "sum")
        and here.attrs.get("dim") == (-1,)
        and value(node).dtype == torch.float32
        and call(here.operands[0]).op == "square"
        and value(call(here.operands[0]).operands[0]).dtype == torch.float32
    )


def _one_norm(node: Node, keep_roundings: bool, changed: list[Node]) -> None:
    squares = call(node).operands[0]
    if not keep_roundings:
        _round_sum(call(squares).operands[0], changed)
    x = call(squares).operands[0]
    mean = _mean(node, changed)
    if mean is None or not _keep_dim(mean, changed):
        return
    variance = only_reader(mean)
    if variance is None or call(variance).op != "add" or len(call(variance).operands) != 1:
        return
    for root in _roots(variance, x, changed):
        for product in _products(root, x, keep_roundings, changed):
            weighted = _weighted(product)
            if weighted is None:
                _add_weight(product, x, changed)
            else:
                _drop_weight_cast(weighted, x, changed)


def _round_sum(x: Node, changed: list[Node]) -> None:
    """Add two rows of 16 bits in their dtype if their sum in fp32 is only normalized, to a row of
    this dtype, and rounded for the next residual.
    """
    rows = _summands(x)
    if rows is None:
        return
    dtype = value(rows[0]).dtype

    def rounds(reader: Node) -> bool:
        return call(reader).op == "cast" and value(reader).dtype == dtype

    products = [reader for reader in x.users if call(reader).op in ("mul", "div")]
    rounded = [reader for reader in x.users if rounds(reader)]
    others = len(x.users) - len(products) - len(rounded)
    normalized = any(rounds(reader) for product in products for reader in product.users)
    if others != 1 or not normalized:
        return
    changed.append(x)
    total = insert(x, aten.add.Tensor, *rows)
    for reader in rounded:
        replace(reader, total)
    replace(x, insert(x, aten._to_copy.default, total, dtype=torch.float32))


def _summands(x: Node) -> list[Node] | None:
    """The two rows of one 16-bit dtype, before casts, whose sum this is; else None."""
    here = call(x)
    if here.op != "add" or len(here.operands) != 2 or here.attrs.get("alpha", 1) != 1:
        return None
    rows = [uncast(operand) or operand for operand in here.operands]
    dtypes = {value(row).dtype for row in rows}
    return rows if len(dtypes) == 1 and dtypes <= set(HALVES) else None


def _mean(node: Node, changed: list[Node]) -> Node | None:
    """The mean that a reduction computes, or None if it is another sum."""
    if call(node).op == "mean":
        return node
    scaled, [squares] = only_reader(node), call(node).operands
    size = value(squares).shape[-1]
    by = factor(scaled) if scaled is not None else None
    if scaled is None or by is None or not isinstance(size, int) or abs(by * size - 1) > 1e-7:
        return None
    keepdim = bool(call(node).attrs.get("keepdim", False))
    return _exchange(scaled, changed, aten.mean.dim, squares, [-1], keepdim)


def _keep_dim(mean: Node, changed: list[Node]) -> bool:
    """Have the mean keep its dimension, if it gets it back later. Returns whether it has it."""
    if call(mean).attrs.get("keepdim", False):
        return True
    chain = [mean]
    while (reader := only_reader(chain[-1])) is not None and (
        call(reader).op in _MOVABLE and len(call(reader).operands) == 1
    ):
        chain.append(reader)
    if reader is None or call(reader).op != "view":
        return False
    if not same_sizes(value(reader).shape, (*value(mean).shape, 1)):
        return False
    changed.append(reader)
    mean.args = (mean.args[0], [-1], True)
    for node in chain:
        infer(node)
    replace(reader, chain[-1])
    return True


def _exchange(
    node: Node, changed: list[Node], target: Callable[..., Tensor], *args: Argument
) -> Node:
    """A call in the place of a node, which was changed."""
    changed.append(node)
    new = insert(node, target, *args)
    replace(node, new)
    return new


def _roots(variance: Node, x: Node, changed: list[Node]) -> list[Node]:
    """The nodes that compute 1 / sqrt(variance), all as rsqrt."""
    roots = []
    for reader in list(variance.users):
        here = call(reader)
        if here.op == "rsqrt":
            roots.append(reader)
        elif here.op == "pow" and here.attrs.get("exponent") == -0.5:
            roots.append(_exchange(reader, changed, aten.rsqrt.default, variance))
        elif here.op == "sqrt" or (here.op == "pow" and here.attrs.get("exponent") == 0.5):
            roots += _sqrt_roots(variance, x, reader, changed)
    return roots


def _sqrt_roots(variance: Node, x: Node, sqrt: Node, changed: list[Node]) -> list[Node]:
    roots = []
    for reader in list(sqrt.users):
        here = call(reader)
        if here.op == "reciprocal" or (here.op == "pow" and here.attrs.get("exponent") == -1):
            roots.append(_exchange(reader, changed, aten.rsqrt.default, variance))
        elif (
            here.op == "div" and not here.attrs and here.operands in ([x, sqrt], [uncast(x), sqrt])
        ):
            root = insert(reader, aten.rsqrt.default, variance)
            _exchange(reader, changed, aten.mul.Tensor, here.operands[0], root)
            roots.append(root)
    return roots


def _products(root: Node, x: Node, keep_roundings: bool, changed: list[Node]) -> list[Node]:
    """The products of a row in fp32 with its root; a row in 16 bits is cast first."""
    products = []
    for reader in list(root.users):
        here = call(reader)
        if here.op == "cast" and value(reader).dtype in HALVES and not keep_roundings:
            products += _rounded_products(reader, root, x, changed)
        elif here.op != "mul" or len(here.operands) != 2:
            continue
        elif x in here.operands:
            products.append(reader)
        elif (narrow := uncast(x)) is not None and narrow in here.operands:
            products.append(_exchange(reader, changed, aten.mul.Tensor, x, root))
    return products


def _rounded_products(rounded: Node, root: Node, x: Node, changed: list[Node]) -> list[Node]:
    """The products of a row in 16 bits with its rounded root, rounded afterwards instead."""
    narrow, products = uncast(x), []
    for reader in list(rounded.users):
        if call(reader).op == "mul" and set(call(reader).operands) == {narrow, rounded}:
            changed.append(reader)
            product = insert(reader, aten.mul.Tensor, x, root)
            dtype = value(reader).dtype
            replace(reader, insert(reader, aten._to_copy.default, product, dtype=dtype))
            products.append(product)
    return products


def _weighted(row: Node) -> Node | None:
    """The product of a normalized row with a vector, maybe after views and casts."""
    for reader in row.users:
        here, weighted = call(reader), None
        if here.op == "mul" and len(here.operands) == 2:
            by_vector = any(value(operand).dim() <= 1 for operand in here.operands)
            weighted = reader if by_vector else None
        elif here.op in _BEFORE_WEIGHT and len(here.operands) == 1:
            weighted = _weighted(reader)
        if weighted is not None:
            return weighted
    return None


def _drop_weight_cast(weighted: Node, x: Node, changed: list[Node]) -> None:
    """Read a weight without its cast to fp32 if the row is in fp32, too: the product promotes."""
    row = uncast(x)
    for operand in call(weighted).operands:
        weight = uncast(operand)
        if (
            row is not None
            and weight is not None
            and value(weight).dim() == 1
            and value(weight).dtype == value(row).dtype
            and all(value(other).dtype == torch.float32 for other in call(weighted).operands)
        ):
            changed.append(weighted)
            weighted.replace_input_with(operand, weight)


def _add_weight(product: Node, x: Node, changed: list[Node]) -> None:
    """Multiply by a weight of ones, if the result has the dtype of the row."""
    narrow = uncast(x)
    size = value(x).shape[-1]
    wanted = torch.float32 if narrow is None else value(narrow).dtype
    rounded = all(
        call(reader).op == "cast" and value(reader).dtype == wanted for reader in product.users
    )
    if not isinstance(size, int) or (narrow is not None and not rounded):
        return
    changed.append(product)
    after = product.next
    ones = insert(after, aten.full.default, [size], 1.0, dtype=wanted, device=value(x).device)
    scaled = insert(after, aten.mul.Tensor, ones, product)
    product.replace_all_uses_with(scaled, delete_user_cb=lambda reader: reader is not scaled)
