"""Dynamo's sources, which say where in a model an input was found: for the next layer made without copies of what stays.

For each layer that reuses a region, torch 2.13 clones each source that the region reads, link by link from the model down:
a third of what Dynamo takes for a layer. A source never changes, so a clone may share the links that are as before.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch._guards import ChainedSource, Source

Transform = Callable[[Source], Source]

_own_clone: Any = vars(ChainedSource).get("clone")  # None before torch 2.12, which traces every layer
_done: MutableMapping[Transform, dict[Source, Source]] = weakref.WeakKeyDictionary()


def share_links(on: bool) -> None:
    """Let clones share what they do not change, or let them be torch's own again."""
    if _own_clone is not None:
        ChainedSource.clone = _clone if on else _own_clone  # type: ignore[assignment, method-assign]


def _clone(source: ChainedSource, transform: Transform | None = None) -> Source:
    """Equal to what torch's own makes."""
    if transform is None:
        return source
    known = _done.setdefault(transform, {}) if isinstance(transform, types.FunctionType) else {}
    return _cloned(source, transform, known)


def _cloned(source: Source, transform: Transform, known: dict[Source, Source]) -> Source:
    found = known.get(source)
    if found is None:
        chained = type(source).clone is _clone
        found = known[source] = transform(_relinked(source, transform, known)) if chained else source.clone(transform)
    return found


def _relinked(source: Source, transform: Transform, known: dict[Source, Source]) -> Source:
    changed = {}
    for name in _fields(type(source)):  # type: ignore[arg-type]
        link = getattr(source, name)
        if isinstance(link, Source) and (cloned := _cloned(link, transform, known)) is not link:
            changed[name] = cloned
    return dataclasses.replace(source, **changed) if changed else source


@functools.cache
def _fields(kind: type[Source]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
