"""Marks the repeated layers of a model, so that torch.compile traces one of each kind and stamps the rest.

A mark is a flag on the layer and, while any layer of the class has one, a `forward` of the class that looks for it: other
models of the class are compiled as before, and a call without torch.compile does what it did.
"""

import contextlib
import functools
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import nn

from atomc.errors import SharingError
from atomc.torch_compat.sources import share_links
from atomc.torch_compat.tracing import ShortenTraceback, TracingError, forget_region, nested_compile_region

T = TypeVar("T")

FLAG = "_atomc_region"

_marked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_own_forwards: dict[type[nn.Module], Any] = {}  # of the classes that look for the flag; None where it is inherited
_lock = threading.Lock()


def prepare(model: nn.Module) -> nn.Module:
    """The model made ready to be compiled for inference: eval mode, no gradients wanted, repeated layers marked.

    torch.compile then traces one layer of each kind, with any backend, until `atomc.unprepare(model)`. A layer
    must be traceable as a whole: with a graph break inside one torch.compile raises UncapturedHigherOrderOpError.
    """
    mark(repeated_layers(model))
    return model.eval().requires_grad_(False)


def unprepare(model: nn.Module) -> nn.Module:
    """The model with its layers unmarked."""
    unmark(model.modules())
    return model


def trace_once(model: object, trace: Callable[[], T], undo: Callable[[Exception], None]) -> T:
    """trace() with the repeated layers of the model marked; should Dynamo object, undo(why), then trace() without marks."""
    with _marks(model, present=True):
        try:
            return trace()
        except (TracingError, SharingError) as error:
            if isinstance(error, ShortenTraceback) and not isinstance(error, SharingError):  # raised by a backend
                raise
            why = error
    with _marks(model, present=False):
        undo(why)
        return trace()


def every_layer(why: Exception) -> str:
    """The note for the report on a trace without marks."""
    first_line = (str(why).splitlines() or [""])[0]
    return f"every layer was traced, since tracing one for all failed: {type(why).__name__}: {first_line}"


@contextlib.contextmanager
def _marks(model: object, present: bool) -> Iterator[None]:
    """The layers of the model are marked within, or none of them is."""
    layers = repeated_layers(model) if isinstance(model, nn.Module) else []
    before = [layer for layer in layers if FLAG in vars(layer)]
    others = [layer for layer in layers if FLAG not in vars(layer)]
    (mark if present else unmark)(layers)
    try:
        yield
    finally:
        mark(before)
        unmark(others)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters, more than one of a class in a ModuleList; none inside another.

    Not those whose `forward` somebody replaced: torch 2.13 takes one for the other if it reaches them by a bound method.
    """
    found: list[nn.Module] = []
    for child in model.children():
        entries = list(child) if isinstance(child, nn.ModuleList) else [child]
        kinds = Counter(map(type, entries))
        for entry in entries:
            usual = "forward" not in vars(entry) and isinstance(type(entry).forward, types.FunctionType)
            repeated = kinds[type(entry)] > 1 and next(entry.parameters(), None) is not None
            found += [entry] if usual and repeated else repeated_layers(entry)
    return found


def mark(layers: Iterable[nn.Module]) -> None:
    """Flag the layers, and let their classes look for the flag."""
    with _lock:
        for layer in layers:
            kind = type(layer)
            if kind not in _own_forwards:
                original = _own_forward(kind)
                _own_forwards[kind] = vars(kind).get("forward")
                kind.forward = _looking_for_the_flag(original)
            setattr(layer, FLAG, True)
            _marked.add(layer)
        share_links(bool(_own_forwards))


def unmark(layers: Iterable[nn.Module]) -> None:
    """Take the flags away, and give classes without marked layers their own forward back."""
    with _lock:
        for layer in layers:
            if FLAG in vars(layer):
                delattr(layer, FLAG)
            _marked.discard(layer)
        for kind in _own_forwards.keys() - {type(layer) for layer in _marked}:
            own = _own_forwards.pop(kind)
            if own is None:
                del kind.forward
            else:
                kind.forward = own
            forget_region(_own_forward(kind))
        share_links(bool(_own_forwards))


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The forward that the class was written with, or inherits."""
    for base in kind.__mro__:
        found = _own_forwards.get(base) or (vars(base).get("forward") if base not in _own_forwards else None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise AssertionError(f"{kind.__name__} has no forward")


def _looking_for_the_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, FLAG, False):
            return region(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    region = nested_compile_region(original)
    return forward
