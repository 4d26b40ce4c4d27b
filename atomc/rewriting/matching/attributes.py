"""Comparing two calls in everything but their tensors: numbers, strings, dtypes, shapes."""

from collections.abc import Iterator

import torch
from torch.fx import Node

from atomc.graph.canonical import Attr, Capture, call, names_of
from atomc.graph.expressions import Size
from atomc.graph.sizes import known_equal
from atomc.report.records import MissKind
from atomc.rewriting.matching.pattern import Deferred, MatchSite

# Kind, what the pattern expects, what was found.
AttrDifference = tuple[MissKind, str, str]


def attr_differences(site: MatchSite, p: Node, g: Node) -> Iterator[AttrDifference]:
    """The differences of two calls, apart from their tensors.

    Binds the captured attributes. Attributes that depend on the sizes and dtypes of inputs are
    deferred to conditions.py.
    """
    wanted, actual = call(p), call(g)
    for name in wanted.attrs | actual.attrs:
        expected, here = wanted.attrs.get(name), actual.attrs.get(name)
        if isinstance(expected, Capture):
            yield from _captured(site, f"{bare(wanted.op)} with {name}", name, expected, here)
        elif _follows_from_inputs(wanted.op, name, expected):
            site.deferred.append(Deferred(p, g, name, expected, here))
        elif (
            isinstance(expected, tuple)
            and isinstance(here, tuple)
            and len(expected) == len(here)
            and any(isinstance(item, Capture) for item in expected)
        ):
            yield from _items(site, name, expected, here)
        elif same_attr(expected, here):
            continue
        elif name == "given" and wanted.op == actual.op:
            yield "attribute", *_operands(bare(wanted.op), names_of(expected), names_of(here))
        else:
            yield (
                "attribute",
                f"{bare(wanted.op)} with {name}={bare(expected)}",
                f"{name}={bare(here)}",
            )


def _follows_from_inputs(op: str, name: str, expected: Attr) -> bool:
    return isinstance(expected, torch.SymInt) or (
        name in ("shape", "dtype") and op in ("view", "expand", "cast")
    )


def _captured(
    site: MatchSite, what: str, name: str, capture: Capture, here: Attr
) -> Iterator[AttrDifference]:
    if capture.among and here not in capture.among:
        yield "attribute", f"{what}={' or '.join(map(bare, capture.among))}", f"{name}={bare(here)}"
    else:
        yield from _bind(site, capture, here)


def _items(
    site: MatchSite, name: str, expected: tuple[Attr, ...], here: tuple[Attr, ...]
) -> Iterator[AttrDifference]:
    """The differences of two tuples of one length; some expected items are captured."""
    for item, actual in zip(expected, here, strict=True):
        if isinstance(item, Capture):
            yield from _bind(site, item, actual)
        elif not same_attr(item, actual):
            yield "attribute", f"{name}={bare(item)}", bare(actual)


def _bind(site: MatchSite, capture: Capture, here: Attr) -> Iterator[AttrDifference]:
    """Bind an argument to a constant, which must be the same everywhere; a dynamic size is not
    constant.
    """
    if here is None or isinstance(here, Node | torch.SymInt | torch.SymFloat):
        yield "scalar", f"a constant for `{capture.name}`", str(here)
    elif (first := site.captured.setdefault(capture.name, here)) != here:
        yield "scalar", f"one `{capture.name}` everywhere (first {first})", str(here)


def _operands(op: str, expected: tuple[str, ...], here: tuple[str, ...]) -> tuple[str, str]:
    """Which operands of an op are missing, or should be absent."""
    missing, extra = (
        [f"`{name}`" for name in a if name not in b]
        for a, b in ((expected, here), (here, expected))
    )
    wanted = [f"with {' and '.join(missing)}"] * bool(missing) + [
        f"without {' or '.join(extra)}"
    ] * bool(extra)
    actual = [f"{' and '.join(extra)} given"] * bool(extra) + [
        f"{' and '.join(missing)} absent"
    ] * bool(missing)
    return f"{op} {', '.join(wanted)}", ", ".join(actual)


def same_attr(expected: Attr, here: Attr) -> bool:
    """Equality that adds no guard on symbolic sizes."""
    if isinstance(expected, tuple) and isinstance(here, tuple):
        return len(expected) == len(here) and all(map(same_attr, expected, here))
    if isinstance(expected, torch.SymInt) or isinstance(here, torch.SymInt):
        return isinstance(expected, Size) and isinstance(here, Size) and known_equal(expected, here)
    return bool(expected == here)


def bare(item: object) -> str:
    """The text of an attribute without namespaces: float32, rms_norm; of a capture, its name."""
    if isinstance(item, Capture):
        return item.name
    if isinstance(item, tuple):
        return f"({', '.join(map(bare, item))}{',' * (len(item) == 1)})"
    return str(item).replace("atom::", "").replace("torch.", "")
