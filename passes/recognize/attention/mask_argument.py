"""The masks of a site as arguments of the op: `causal` and `window`, or the sum of all masks."""

import math

import torch
from torch.fx import Node

from atomc.graph.canonical import value
from atomc.graph.edit import insert
from atomc.graph.sizes import known_equal
from atomc.passes.recognize.attention.causal_mask import Band, visible
from atomc.passes.recognize.attention.heads import Shape, reshape
from atomc.passes.recognize.attention.masks import HIDES
from atomc.passes.recognize.attention.match_site import AttentionSite
from atomc.passes.recognize.attention.walk import Added
from atomc.rewriting.matching.pattern import Unlike

aten = torch.ops.aten


def visible_keys(site: AttentionSite) -> Band | None:
    """The visible keys, if the masks hide exactly the later keys (and those before a window), or
    none. A reason why they nearly do is noted in `unproven`.
    """
    band, walk = Band(), site.walk
    for added in walk.added:
        try:
            seen = visible(added.mask, added.at, HIDES)
        except Unlike as unlike:
            walk.unproven.append(unlike.difference)
            return None
        if seen is None or added.factor <= 0:
            return None
        band = band & seen
    causal = band.high == 0 and (band.low == -math.inf or _all_rows_see(site, band))
    return band if causal or band == Band() else None


def _all_rows_see(site: AttentionSite, window: Band) -> bool:
    """Whether each row sees a key. For one that does not, a mask of finite numbers has the mean of
    all values, and the op any finite result.
    """
    rows, keys = site.shape[-2:]
    fewer = isinstance(rows, int) and isinstance(keys, int) and rows <= keys
    return window.low <= 0 and (fewer or known_equal(rows, keys))


def sum_of_masks(site: AttentionSite) -> Node:
    """All masks as one, [.., N or 1, T or 1, S], in the order in which they apply; a single one
    that fills with -inf is bool.
    """
    before, masks = site.result, site.walk.added
    if [added.fill for added in masks] == [-math.inf]:
        seen = insert(before, aten.logical_not.default, masks[0].mask)
        return _align_mask(before, seen, masks[0].at, site.shape)
    total: Node | None = None
    for added in reversed(masks):
        total = _combine(before, total, added, site.shape)
    assert total is not None
    return total


def _combine(before: Node, total: Node | None, added: Added, shape: Shape) -> Node:
    """One more mask after others. One that fills takes the place of what was added before: keys
    that several hide weigh as much as others in a row without visible keys.
    """
    mask = added.mask
    if added.fill is None and added.factor != 1.0:
        mask = insert(before, aten.mul.Tensor, mask, added.factor)
    mask = _align_mask(before, mask, added.at, shape)
    if added.fill is None:
        return mask if total is None else insert(before, aten.add.Tensor, total, mask)
    dtype = value(before if total is None else total).dtype
    # float16 has no number that hides beside every score.
    dtype = torch.float32 if dtype == torch.float16 else dtype
    if total is None:
        total = insert(before, aten.zeros_like.default, mask, dtype=dtype, memory_format=None)
    elif value(total).dtype != dtype:
        total = insert(before, aten._to_copy.default, total, dtype=dtype)
    return insert(before, aten.masked_fill.Scalar, total, mask, _hiding(added, dtype))


def _hiding(added: Added, dtype: torch.dtype) -> float:
    return -math.inf if added.fill == -math.inf else torch.finfo(dtype).min


def _align_mask(before: Node, mask: Node, at: Node, shape: Shape) -> Node:
    """A mask of scores [B * N, T, S] as one of [B, N, T, S]."""
    here, merged = value(mask).shape, value(at).dim() < len(shape)
    if len(here) < 2:
        return reshape(before, mask, [1, *here] if here else [1, 1])
    if len(here) < 3 or not merged:
        return mask
    leading = [1, 1] if known_equal(here[0], 1) else list(shape[:2])
    return reshape(before, mask, [*leading, *here[1:]])
