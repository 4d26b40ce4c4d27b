"""Marks the repeated layers of a model as nested compile regions, so that torch.compile traces one
layer of each kind.

A mark is a flag on the layer. While any layer of a class has the flag, the class has a `forward`
that checks it: other models with this class are compiled as before, and a call without
torch.compile is unchanged.
"""

import contextlib
import functools
import logging
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from atomc.errors import SharingError, first_line
from atomc.torch_compat.dynamo_sources import share_source_links
from atomc.torch_compat.module_tree import module_names
from atomc.torch_compat.region_failures import on_region_failure
from atomc.torch_compat.tracing import (
    ShortenTraceback,
    TracingError,
    forget_region,
    nested_compile_region,
)

P = ParamSpec("P")
T = TypeVar("T")
Forward = Callable[..., Any]  # of torch.nn.Module

FLAG = "_atomc_region"

_marked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# Of the classes that check the flag; None if it is inherited.
_original_forwards: dict[type[nn.Module], Forward | None] = {}
_lock = threading.Lock()
# Layers that were marked until Dynamo failed to trace one of them, and its error.
_left_off: "weakref.WeakKeyDictionary[nn.Module, Exception]" = weakref.WeakKeyDictionary()
log = logging.getLogger("atomc")


def prepare(model: nn.Module) -> nn.Module:
    """Set eval mode and no gradients, and mark the model's repeated layers, in place (see
    atomc.prepare).
    """
    mark(repeated_layers(model))
    return model.eval().requires_grad_(False)


def unprepare(model: nn.Module) -> nn.Module:
    """Remove the marks from the model's layers."""
    unmark(model.modules())
    return model


def trace_once(model: object, trace: Callable[[], T], undo: Callable[[Exception], None]) -> T:
    """trace() with the repeated layers of the model marked; if Dynamo fails, undo(why) and trace()
    without marks.
    """
    with _marks(model, present=True):
        try:
            return trace()
        except (TracingError, SharingError) as error:
            if isinstance(error, ShortenTraceback) and not isinstance(
                error, SharingError
            ):  # raised by a backend
                raise
            why = error
    with _marks(model, present=False):
        undo(why)
        return trace()


def leave_off(layer: nn.Module, why: Exception) -> bool:
    """Remove the marks from the layers of this class in the module that is compiled, because Dynamo
    cannot trace the layer as a region. False if it has no mark.
    """
    if FLAG not in vars(layer):
        return False
    _, root = module_names().get(id(layer), ("", layer))
    layers = [module for module in root.modules() if type(module) is type(layer)]
    unmark(layers)
    _left_off.update(dict.fromkeys(layers, why))
    log.warning("%s: %s", type(layer).__name__, region_failure_note(why))
    return True


def notes_of(modules: Container[int]) -> list[str]:
    """Why layers among these modules, by id, are traced one by one: for the report."""
    whys = (why for layer, why in list(_left_off.items()) if id(layer) in modules)
    return list(dict.fromkeys(map(region_failure_note, whys)))


def region_failure_note(why: Exception) -> str:
    """The note for the report that every layer was traced, and why."""
    return (
        f"every layer was traced, because tracing regions failed: {type(why).__name__}: "
        f"{first_line(why)}"
    )


@contextlib.contextmanager
def _marks(model: object, present: bool) -> Iterator[None]:
    """Inside the context, all repeated layers of the model are marked, or none is."""
    layers = repeated_layers(model) if isinstance(model, nn.Module) else []
    before = [layer for layer in layers if FLAG in vars(layer)]
    others = [layer for layer in layers if FLAG not in vars(layer)]
    (mark if present else unmark)(layers)
    try:
        yield
    finally:
        mark(layer for layer in before if layer not in _left_off)
        unmark(others)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters of which a ModuleList contains several of the same class; outermost
    only.

    Modules with a replaced `forward` are excluded: torch 2.13 confuses layers that it calls through
    a bound method.
    """
    layers: list[nn.Module] = []
    for child in model.children():
        entries = list(child) if isinstance(child, nn.ModuleList) else [child]
        kinds = Counter(map(type, entries))
        for entry in entries:
            unmodified = "forward" not in vars(entry) and isinstance(
                type(entry).forward, types.FunctionType
            )
            repeated = kinds[type(entry)] > 1 and next(entry.parameters(), None) is not None
            layers += [entry] if unmodified and repeated else repeated_layers(entry)
    return layers


def mark(layers: Iterable[nn.Module]) -> None:
    """Set the flag on the layers, and let their classes check it."""
    with _lock:
        for layer in layers:
            kind = type(layer)
            if kind not in _original_forwards:
                original = _original_forward(kind)
                _original_forwards[kind] = vars(kind).get("forward")
                kind.forward = _dispatch_on_flag(original)
            setattr(layer, FLAG, True)
            _marked.add(layer)
            _left_off.pop(layer, None)
        _watch_dynamo()


def unmark(layers: Iterable[nn.Module]) -> None:
    """Remove the flags, and restore the forward of classes without marked layers."""
    with _lock:
        for layer in layers:
            if FLAG in vars(layer):
                delattr(layer, FLAG)
            _marked.discard(layer)
            _left_off.pop(layer, None)
        for kind in _original_forwards.keys() - {type(layer) for layer in _marked}:
            original = _original_forwards.pop(kind)
            if original is None:
                del kind.forward
            else:
                kind.forward = original
            forget_region(_original_forward(kind))
        _watch_dynamo()


def _watch_dynamo() -> None:
    """Change Dynamo while there are marks."""
    share_source_links(bool(_original_forwards))
    on_region_failure(leave_off if _original_forwards else None)


def _original_forward(kind: type[nn.Module]) -> Forward:
    """The forward that the class defines or inherits, without flag check."""
    for base in kind.__mro__:
        forward = _original_forwards.get(base) or (
            vars(base).get("forward") if base not in _original_forwards else None
        )
        if forward is not None:
            return forward
    raise AssertionError(f"{kind.__name__} has no forward")


def _dispatch_on_flag(
    original: Callable[Concatenate[nn.Module, P], T],
) -> Forward:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: P.args, **kwargs: P.kwargs) -> T:
        if getattr(self, FLAG, False):
            return region(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    region = nested_compile_region(original)
    return forward
