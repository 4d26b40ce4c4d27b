"""Comparing two calls in everything but their tensors: numbers, strings, dtypes, shapes."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Node

from atomc.graph.canonical import Capture, call
from atomc.graph.expressions import Size
from atomc.graph.sizes import known_equal
from atomc.matching.pattern import Site
from atomc.report_records import MissKind

Veto = Callable[[MissKind, str, str], bool]


def compare_attrs(site: Site, p: Node, g: Node, veto: Veto) -> bool:
    """Compare everything but tensors; `veto(kind, expected, found)` says whether to go on after a difference."""
    wanted, found = call(p), call(g)
    for name in wanted.attrs.keys() | found.attrs.keys():
        expected, here = wanted.attrs.get(name), found.attrs.get(name)
        if isinstance(expected, Capture):
            if expected.among and here not in expected.among:
                among = " or ".join(map(bare, expected.among))
                if not veto("attribute", f"{bare(wanted.op)} with {name}={among}", f"{name}={bare(here)}"):
                    return False
            elif not _bind(site, expected, here, veto):
                return False
        elif wanted.op in ("view", "expand", "cast") and name in ("shape", "dtype"):
            site.deferred.append((p, g, name, expected, here))
        elif _holds_capture(expected) and _as_long(expected, here):
            for item, found_item in zip(cast("tuple[Any, ...]", expected), cast("tuple[Any, ...]", here), strict=True):
                if isinstance(item, Capture):
                    if not _bind(site, item, found_item, veto):
                        return False
                elif not same_attr(item, found_item) and not veto("attribute", f"{name}={bare(item)}", bare(found_item)):
                    return False
        elif isinstance(expected, torch.SymInt):
            site.deferred.append((p, g, name, expected, here))
        elif name == "given" and expected != here and wanted.op == found.op:
            if not veto("attribute", *_operands(bare(wanted.op), expected or (), here or ())):
                return False
        elif not same_attr(expected, here) and not veto("attribute", f"{bare(wanted.op)} with {name}={bare(expected)}",
                                           f"{name}={bare(here)}"):  # fmt: skip
            return False
    return True


def _operands(op: str, expected: tuple[str, ...], here: tuple[str, ...]) -> tuple[str, str]:
    """Which operands of an op are missing, or too many."""
    missing, extra = ([f"`{name}`" for name in a if name not in b] for a, b in ((expected, here), (here, expected)))
    wanted = [f"with {' and '.join(missing)}"] * bool(missing) + [f"without {' or '.join(extra)}"] * bool(extra)
    found = [f"{' and '.join(extra)} given"] * bool(extra) + [f"{' and '.join(missing)} absent"] * bool(missing)
    return f"{op} {', '.join(wanted)}", ", ".join(found)


def _holds_capture(attr: Any) -> bool:
    return isinstance(attr, tuple) and any(isinstance(item, Capture) for item in attr)


def _as_long(expected: Any, here: Any) -> bool:
    return isinstance(here, tuple) and len(here) == len(expected)


def _bind(site: Site, capture: Capture, here: Any, veto: Veto) -> bool:
    """The argument is what stands here, and the same everywhere; a size that varies is no constant."""
    if here is None or isinstance(here, Node | torch.SymInt | torch.SymFloat):
        return veto("scalar", f"a constant for `{capture.name}`", str(here))
    first = site.bound.setdefault(capture.name, here)
    return bool(first == here) or veto("scalar", f"one `{capture.name}` everywhere (first {first})", str(here))


def same_attr(expected: Any, here: Any) -> bool:
    """Equality that adds no guard where a size is symbolic."""
    if isinstance(expected, tuple) and isinstance(here, tuple):
        return len(expected) == len(here) and all(map(same_attr, expected, here))
    if isinstance(expected, torch.SymInt) or isinstance(here, torch.SymInt):
        return isinstance(expected, Size) and isinstance(here, Size) and known_equal(expected, here)
    return bool(expected == here)


def bare(item: object) -> str:
    """Without the namespace: float32, rms_norm; of what the site decides, its name."""
    if isinstance(item, Capture):
        return item.name
    if isinstance(item, tuple):
        return f"({', '.join(map(bare, item))}{',' * (len(item) == 1)})"
    return str(item).replace("atom::", "").replace("torch.", "")
