"""A complete walk, where nothing prevents the op."""

import math
from typing import NamedTuple

import torch
from torch.fx import Node

from atomc.graph.canonical import readers, value
from atomc.graph.edit import nodes_between
from atomc.graph.expressions import Size
from atomc.graph.mutation import mutated, storage
from atomc.graph.provenance import describe
from atomc.graph.sizes import known_equal, same_sizes, spell_shape
from atomc.ops.formats import HALVES
from atomc.passes.recognize.attention.walk import Added, Walk
from atomc.rewriting.graph_pass import Context
from atomc.rewriting.matching.pattern import Unlike

# With a bias for each head, torch's attention of a CPU takes longer than what it replaces: in 16
# bits up to this number of queries; in wider dtypes for one query, or up to this number of scores,
# if Inductor compiles the glue (bench/cpu_alibi.py).
BIASED_QUERIES = 1024
BIASED_SCORES = 32_768


class AttentionSite(NamedTuple):
    """scores: the product of queries and keys; result: that of weights and values; shape: of the
    scores, [N, T, S] or [B, N, T, S].
    """

    walk: Walk
    scores: Node
    result: Node
    shape: list[Size]


def checked_site(walk: Walk, scores: Node, result: Node, context: Context) -> AttentionSite:
    """The site. Raises Unlike for sizes, readers, writes and options that do not allow the op."""
    site = AttentionSite(walk, scores, result, _scores_shape(walk, scores))
    _check_sizes(site)
    _check_masks(site)
    _check_readers(site)
    _check_writes(site)
    if context.options.rounding == "hf" and value(result).dtype != torch.float32:
        rounds = f"rounding='hf' keeps scores and weights rounded to {value(result).dtype}"
        raise Unlike("guard", "a model in float32, or rounding='fp32'", rounds, walk.softmax)
    _check_speed(site, context)
    return site


def _check_speed(site: AttentionSite, context: Context) -> None:
    """Raise Unlike where the kernel is known to be slower than the nodes of the site."""
    biases = [added for added in site.walk.added if added.fill is None and _is_of_heads(added)]
    if not biases or not context.platform.is_cpu or context.paged:
        return
    queries, scores = site.shape[-2], math.prod(site.shape)
    if value(site.result).dtype in HALVES:
        wanted = f"more than {BIASED_QUERIES} queries, or float32"
        few = isinstance(queries, int) and queries <= BIASED_QUERIES
    else:
        wanted = f"several queries with more than {BIASED_SCORES} scores, or glue='eager'"
        few = known_equal(queries, 1) or (isinstance(scores, int) and scores <= BIASED_SCORES)
        few = few and context.options.glue != "eager"
    if few:
        raise Unlike(
            "guard",
            wanted,
            f"{spell_shape(site.shape)} scores with a bias for each head, for which torch's "
            "attention of a CPU is slower than the written form (bench/cpu_alibi.py)",
            biases[0].at,
        )


def _is_of_heads(added: Added) -> bool:
    shape = value(added.mask).shape
    return len(shape) > 2 and not known_equal(shape[-3], 1)


def _scores_shape(walk: Walk, scores: Node) -> list[Size]:
    """As many dimensions as the softmax has, or four if a mask has them; the last size of the
    softmax may include the sink.
    """
    *leading, _ = value(walk.softmax).shape
    if len(leading) not in (2, 3):
        rank = f"rank {len(leading) + 1}"
        raise Unlike("size", "scores [N, T, S] or [B, N, T, S]", rank, walk.softmax)
    if len(leading) == 2:
        leading = _mask_dims(walk, leading)
    return [*leading, value(scores).shape[-1]]


def _mask_dims(walk: Walk, leading: list[Size]) -> list[Size]:
    """[B, N, T] if a mask is added to a view [B, N, T, S] of the scores; else [B * N, T]."""
    for added in walk.added:
        *heads, rows, _ = value(added.at).shape
        if len(heads) == 2 and same_sizes([math.prod(heads), rows], leading):
            return [*heads, rows]
    return leading


def _check_sizes(site: AttentionSite) -> None:
    *heads, rows, keys = site.shape
    for product, columns in ((site.scores, keys), (site.result, value(site.result).shape[-1])):
        wanted = [math.prod(heads), rows, columns]
        if not same_sizes(value(product).shape, wanted):
            actual = f"{spell_shape(value(product).shape)} of {describe(product)}"
            raise Unlike("size", spell_shape(wanted), actual, product)


def _check_masks(site: AttentionSite) -> None:
    """Masks apply to scores of the shape of the site, or to [B * N, T, S]."""
    for added in site.walk.added:
        shape = list(value(added.at).shape)
        wanted = site.shape if len(shape) == len(site.shape) else [shape[0], *site.shape[-2:]]
        if not same_sizes(shape, wanted):
            expected = f"a mask for scores {spell_shape(site.shape)}"
            raise Unlike("size", expected, spell_shape(shape), added.mask)


def _check_readers(site: AttentionSite) -> None:
    for node in site.walk.inside:
        for reader in readers(node) if node is not site.result else ():
            if reader not in site.walk.inside:
                who = "the graph returns it" if reader.op == "output" else describe(reader)
                raise Unlike("extra user", f"no other reader of {describe(node)}", who, node)


def _check_writes(site: AttentionSite) -> None:
    """Between the first replaced node and the last, nothing may write what they read."""
    inside = site.walk.inside
    read = {storage(operand) for node in inside for operand in node.all_input_nodes}
    for node in nodes_between(min(inside), site.result):
        for target in mutated(node):
            if storage(target) in read:
                raise Unlike("mutation", f"{describe(target)} unchanged", "it is written", target)
