"""Parameters whose memory was freed, because kernels read only weights prepared from them.

The registry and programs keep such a parameter, without memory. Modules get one on the meta device
of the same shape in its place, which torch refuses to read; they refuse to save or load a
state_dict. While another program is compiled from a module, the parameters are in their places.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from torch import nn

from atomc.errors import RunError
from atomc.weights import registry as weights
from atomc.weights.registry import location_of, parameter_of

P = ParamSpec("P")
R = TypeVar("R")
REASON = (
    "the runtime holds weights of this module only as its kernels read them, and freed the "
    "originals: load the checkpoint again (atomc.loading.loader.load) to save, read or change them"
)


def with_freed_parameters(
    function: Callable[Concatenate[nn.Module, P], R],
) -> Callable[Concatenate[nn.Module, P], R]:
    """A function of a module, called while the module has its parameters, freed ones included."""

    @functools.wraps(function)
    def call(model: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with freed_parameters(model):
            return function(model, *args, **kwargs)

    return call


@contextmanager
def freed_parameters(model: nn.Module) -> Iterator[None]:
    """A context in which the module has its freed parameters in their places. Those that are freed
    inside are replaced at its end.
    """
    with weights.lock:
        places = [
            (module, name, parameter, location_of(parameter).stands_for)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        for module, name, _, original in places:
            if original is not None:
                module._parameters[name] = original
    try:
        yield
    finally:
        with weights.lock:
            for module, name, parameter, _ in places:
                module._parameters[name] = parameter
            _replace_freed(model)


def forms_held(parameter: nn.Parameter) -> str | None:
    """For cache keys: how programs of the runtime hold a parameter; None if none does."""
    location = location_of(parameter)
    if weights.is_freed(parameter):
        names = (form.prepare.__qualname__ for form in location.prepared.values())
        return f"only prepared, by {', '.join(names)}"
    return "read as it is" if location.read else None


def _replace_freed(model: nn.Module) -> None:
    placeholders: dict[int, nn.Parameter] = {}  # one for all places of a shared parameter
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not weights.is_freed(parameter):
                continue
            if id(parameter) not in placeholders:
                placeholders[id(parameter)] = parameter_of(parameter.to("meta"))
                location_of(placeholders[id(parameter)]).stands_for = parameter
            module._parameters[name] = placeholders[id(parameter)]
            module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(*_: object) -> NoReturn:
    raise RunError(REASON)
