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
from atomc.passes.recognize.attention.site import Site
from atomc.passes.recognize.attention.walk import Added, Unlike

aten = torch.ops.aten


def visible_keys(site: Site) -> Band | None:
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


def _all_rows_see(site: Site, window: Band) -> bool:
    """Whether each row sees a key. The op returns zero for one that does not, a mask of finite
    numbers the mean of all values.
    """
    rows, keys = site.shape[-2:]
    fewer = isinstance(rows, int) and isinstance(keys, int) and rows <= keys
    return window.low <= 0 and (fewer or known_equal(rows, keys))


def sum_of_masks(site: Site) -> Node:
    """The sum of all masks, [.., N or 1, T or 1, S]; a single one that fills with -inf is bool."""
    before, masks = site.result, site.walk.added
    if [added.fill for added in masks] == [-math.inf]:
        seen = insert(before, aten.logical_not.default, masks[0].mask)
        return _at_scores(before, seen, masks[0].at, site.shape)
    dtype = value(before).dtype
    total, *parts = [
        _at_scores(before, _float_mask(before, added, dtype), added.at, site.shape)
        for added in masks
    ]
    for part in parts:
        total = insert(before, aten.add.Tensor, total, part)
    return total


def _float_mask(before: Node, added: Added, dtype: torch.dtype) -> Node:
    if added.fill is None:
        scaled = added.factor != 1.0
        return insert(before, aten.mul.Tensor, added.mask, added.factor) if scaled else added.mask
    # float16 has no number that hides beside every score.
    dtype = torch.float32 if dtype == torch.float16 else dtype
    hidden = added.fill if added.fill == -math.inf else torch.finfo(dtype).min
    zeros = insert(before, aten.zeros_like.default, added.mask, dtype=dtype, memory_format=None)
    return insert(before, aten.masked_fill.Scalar, zeros, added.mask, hidden)


def _at_scores(before: Node, mask: Node, at: Node, shape: Shape) -> Node:
    """A mask of scores [B * N, T, S] as one of [B, N, T, S]."""
    here, merged = value(mask).shape, value(at).dim() < len(shape)
    if len(here) < 2:
        return reshape(before, mask, [1, *here] if here else [1, 1])
    if len(here) < 3 or not merged:
        return mask
    leading = [1, 1] if known_equal(here[0], 1) else list(shape[:2])
    return reshape(before, mask, [*leading, *here[1:]])
