"""Functions that declare only what they read of the arguments of an op: kernels, refusals, shapes.

`**gate: Unpack[Gate]` declares the keys of a TypedDict, and `Annotated[bool, False]` the default of
one. `**arguments` of another type takes all arguments.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Signature
from typing import TypeVar, Unpack, get_args, get_origin, get_type_hints

T = TypeVar("T")


@functools.cache
def declared(function: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function by name; None: it takes arguments of any name."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a builtin function
        return None
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and get_origin(parameter.annotation) is Unpack:
            [keys] = get_args(parameter.annotation)
            types, hints = get_type_hints(keys), get_type_hints(keys, include_extras=True)
            for key, hint in hints.items():
                [default] = getattr(hint, "__metadata__", (inspect.Parameter.empty,))
                parameters[key] = inspect.Parameter(
                    key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=types[key]
                )
        elif parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            return None
        else:
            parameters[name] = parameter
    return parameters


def signature_of(function: Callable[..., object]) -> Signature:
    """Its signature, with the keys of a TypedDict as parameters."""
    signature, parameters = inspect.signature(function), declared(function)
    return signature if parameters is None else signature.replace(parameters=[*parameters.values()])


def call_by_name(function: Callable[..., T], **arguments: object) -> T:
    """function(...) of those of these arguments that it declares."""
    names = declared(function)
    return function(**{name: x for name, x in arguments.items() if names is None or name in names})


def with_signature(function: Callable[..., T], signature: Signature) -> Callable[..., T]:
    """`function`, to be called with all parameters of the signature, of which it declares some.

    Raises ValueError if it declares a parameter that is none of them and has no default.
    """
    names, parameters = declared(function), signature.parameters
    if names is None or _called(inspect.signature(function)) == _called(signature):
        return function
    unknown = [n for n, p in names.items() if p.default is p.empty and n not in parameters]
    if unknown:
        raise ValueError(f"{function} declares {unknown}, the op has {[*parameters]}")
    call = _passing(function, [name for name in names if name in parameters], signature)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    by_place = (name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY)
    functools.update_wrapper(call, function)
    vars(call).update(__signature__=signature)
    call.__defaults__ = tuple(defaults[name] for name in by_place if name in defaults)
    call.__kwdefaults__ = defaults
    return call


def _passing(
    function: Callable[..., T], names: Iterable[str], signature: Signature
) -> Callable[..., T]:
    """A function with the parameters of the signature that passes these to `function`, by name."""
    empty = inspect.Parameter.empty
    bare = [p.replace(default=empty, annotation=empty) for p in signature.parameters.values()]
    # Its code stands where that of the function does, for tracebacks and fingerprints.
    place = getattr(function, "__code__", call_by_name.__code__)
    lines = "\n" * (place.co_firstlineno - 1)
    passed = ", ".join(f"{name}={name}" for name in names)
    text = f"{lines}lambda {str(Signature(bare))[1:-1]}: function({passed})"
    namespace = {"__name__": function.__module__, "function": function}
    call: Callable[..., T] = eval(compile(text, place.co_filename, "eval"), namespace)
    return call


def _called(signature: Signature) -> dict[str, tuple[object, object]]:
    return {name: (p.kind, p.default) for name, p in signature.parameters.items()}
