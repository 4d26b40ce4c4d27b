"""The code of a library (transformers) that the forward of its classes can reach, as parts of a
model's cache key.

Reached is what the code names: its globals, what it imports, and each attribute of a reached class
or module that has a name which any reached code uses, also as a text (getattr). The key has the
files of reached modules, the values of reached names, and for a function its place and what it
closes over, so that a function in the place of another changes the key.
"""

import collections
import enum
import functools
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atomc.cache.artifact import Uncacheable
from atomc.cache.fingerprint import (
    PACKAGE,
    PLAIN_TENSORS,
    Parts,
    digest,
    digest_of_values,
    file_digest,
    tensor_layout,
)

LIBRARIES = ("transformers",)
PLAIN_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
# Attributes of every nn.Module; all others are set by its class.
MODULE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
# The file of a function that was made from a text, as methods of a dataclass are.
_MADE = "<string>"
_NOT_FOLLOWED = (str(Path(torch.__file__).parent), str(PACKAGE))
_INSTALLED_IN = tuple({sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")})
# Of an object of these packages, the key has the type only.
_KNOWN = sys.stdlib_module_names | {"torch", "atomc"}
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict, types.MappingProxyType)
# Special names that no forward runs.
_NOT_RUN = frozenset(
    {
        *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__repr__"),
        *("__init_subclass__", "__reduce__", "__getstate__", "__setstate__", "__deepcopy__"),
    }
)

# What no forward reads, and each process has in its own way: a hash of texts, a random number, the
# outputs and modules of all models that were imported, the installed packages by their modules.
_NOT_READ = frozenset(
    {"_original_object_hash", "SESSION_ID", "_registered_model_output_types", "_modules"}
    | {"PACKAGE_DISTRIBUTION_MAPPING"}
)


def in_library(name: str) -> bool:
    """Whether a module of this name belongs to one of LIBRARIES."""
    return name.partition(".")[0] in LIBRARIES


def is_library_file(file: str) -> bool:
    """Whether code of this file is followed: that of LIBRARIES and of other installed packages, but
    not of torch and atomc, and code without a file.
    """
    inits = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    folders = [str(Path(init).parent) for init in inits if init]
    installed = file.startswith((*folders, *_INSTALLED_IN)) and not file.startswith(_NOT_FOLLOWED)
    return installed or file == _MADE


class LibraryCode:
    """Collects reached code.

    text_of  the text of a function of atomc, torch or the standard library and what it is called in
            errors. Raises Uncacheable for other functions.
    """

    def __init__(self, text_of: Callable[[types.FunctionType, str], str]):
        self._text_of = text_of
        self._functions: dict[types.FunctionType, None] = {}
        self._namespaces: dict[str, Mapping[str, Any]] = {}
        self._classes: dict[str, type] = {}
        self._names = {"forward"}
        self._lines: dict[str, dict[str, str]] = {}  # by module, then by name
        self._within: set[int] = set()

    def add_class(self, kind: type) -> None:
        """The class and its bases in the library are reached."""
        for base in kind.__mro__:
            if in_library(base.__module__):
                name = class_name(base)
                self._namespaces[name] = vars(base)
                self._classes[name] = base

    def parts(self) -> Parts:
        """A part per module and per file. Raises Uncacheable for what has no text."""
        size = -1
        while size != (size := self._size()):
            for function in list(self._functions):
                self._follow(function)
            for where, namespace in list(self._namespaces.items()):
                self._read(where, namespace)
        if not self._lines:
            return {}
        parts = {"installed packages": digest("\n".join(_installed()))}
        for library in LIBRARIES:
            parts[f"version of {library}"] = str(getattr(sys.modules[library], "__version__", None))
        for name, lines in self._lines.items():
            parts[f"names in {name}"] = digest("\n".join(f"{k}: {lines[k]}" for k in sorted(lines)))
            file = getattr(sys.modules.get(name), "__file__", None)
            if file is not None:
                parts[f"source of {name}"] = file_digest(Path(file))
        return parts

    def _size(self) -> int:
        lines = sum(map(len, self._lines.values()))
        return len(self._functions) + len(self._namespaces) + len(self._names) + lines

    def _follow(self, function: types.FunctionType) -> None:
        """Read the globals that a function names, and the modules that it imports."""
        namespace, home = function.__globals__, function.__globals__["__name__"]
        self._lines.setdefault(home, {})
        names = _names_in(function.__code__)
        self._names |= names
        for name in names:
            if name in namespace:
                self._line(home, name, namespace[name])
                continue
            for module in _imported(name, namespace.get("__package__") or ""):
                self._namespaces[module] = vars(sys.modules[module])

    def _read(self, where: str, namespace: Mapping[str, Any]) -> None:
        """Read the attributes of a class or module that any reached code names."""
        kind = self._classes.get(where)
        home = kind.__module__ if kind else where
        prefix = f"{kind.__qualname__}." if kind else ""
        is_module = kind is not None and issubclass(kind, nn.Module)
        for name, item in list(namespace.items()):
            special = kind is not None and name.startswith("__") and name not in _NOT_RUN
            if (name in self._names or special) and not (is_module and name == "__init__"):
                self._line(home, f"{prefix}{name}", item)

    def _line(self, home: str, name: str, item: Any) -> None:
        lines = self._lines.setdefault(home, {})
        if name not in lines and name not in _NOT_READ:
            lines[name] = ""  # it may reach itself
            lines[name] = self.text(item, f"{home}.{name}")

    def text(self, item: Any, where: str) -> str:
        """The text of a value, equal for equal values in two processes; what it consists of is
        reached. Of an object of the standard library, of torch or of another installed package it
        is the type. Raises Uncacheable for other objects.
        """
        if type(item) in PLAIN_TYPES:
            return repr(item)
        if id(item) in self._within:
            return "itself"
        self._within.add(id(item))
        try:
            return self._text(item, type(item), where)
        finally:
            self._within.discard(id(item))

    def _text(self, item: Any, kind: type, where: str) -> str:
        if kind in (list, tuple):
            return f"{kind.__name__}({self._texts(item, where)})"
        if kind in (set, frozenset):
            return f"{kind.__name__}({', '.join(sorted(self.text(each, where) for each in item))})"
        if kind in _MAPPINGS:
            pairs = (self._texts(pair, where) for pair in item.items())
            return f"{kind.__name__}({'; '.join(pairs)})"
        if isinstance(item, types.ModuleType):
            if in_library(item.__name__):
                self._namespaces[item.__name__] = vars(item)
            return f"module {item.__name__}"
        if isinstance(item, type):
            self.add_class(item)
            return f"class {class_name(item)}"
        if functions := functions_in(item):
            return " ".join(self.function(function, where) for function in functions)
        return self._object(item, kind, where)

    def _object(self, item: Any, kind: type, where: str) -> str:
        if kind is types.MethodType:
            return f"method({self._texts((item.__func__, item.__self__), where)})"
        if kind is functools.partial:
            return f"partial({self._texts((item.func, item.args, item.keywords), where)})"
        if kind is re.Pattern:
            return f"pattern {item.pattern!r} {item.flags}"
        if kind in PLAIN_TENSORS:
            return f"{tensor_layout(item)} {digest_of_values(item)}"
        if isinstance(item, enum.Enum):
            return f"{class_name(kind)}.{item.name}"
        if in_library(kind.__module__) or isinstance(item, nn.Module):
            self.add_class(kind)
            fields = [f"{name}={self.text(held, where)}" for name, held in _fields_of(item).items()]
            return f"{class_name(kind)}({', '.join(fields)})"
        file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if kind.__module__.partition(".")[0] in _KNOWN or is_library_file(file):
            return f"{class_name(kind)} {getattr(item, '__qualname__', '')}"
        raise Uncacheable(
            f"{where} is a {class_name(kind)}, which cannot be compared between processes"
        )

    def _texts(self, items: Iterable[Any], where: str) -> str:
        return ", ".join(self.text(item, where) for item in items)

    def function(self, function: types.FunctionType, where: str) -> str:
        """Which code a function is: its module, name and line, or its instructions if it has no
        file, and what it closes over, such as a function that it wraps.
        """
        code = function.__code__
        followed = is_library_file(code.co_filename)
        if not followed and not hasattr(function, "__wrapped__"):
            return self._text_of(function, where)
        text = f"{function.__globals__['__name__']}.{code.co_qualname}:{code.co_firstlineno}"
        if code.co_filename == _MADE:
            text += f" {digest(repr(_instructions(code)))}"
        if followed:
            self._functions[function] = None
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        closed = [f"{name}={self.text(cell.cell_contents, where)}" for name, cell in cells]
        return f"{text}({', '.join(closed)})"


def functions_in(item: Any) -> list[types.FunctionType]:
    """The functions of an attribute: a function, or those of a method, property or cache."""
    parts: list[Any] = [item]
    if isinstance(item, staticmethod | classmethod):
        parts = [item.__func__]
    elif isinstance(item, property):
        parts = [item.fget, item.fset, item.fdel]
    elif isinstance(item, functools.cached_property):
        parts = [item.func]
    elif isinstance(item, functools._lru_cache_wrapper):
        parts = [item.__wrapped__]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _fields_of(item: Any) -> dict[str, Any]:
    """The attributes of an object, sorted by name; of an nn.Module those that its class sets, and
    its parameters, buffers and children.
    """
    slots = [name for base in type(item).__mro__ for name in getattr(base, "__slots__", ())]
    fields = {name: getattr(item, name) for name in slots if hasattr(item, name)}
    fields |= getattr(item, "__dict__", {})
    if isinstance(item, nn.Module):
        held = {**item._parameters, **item._buffers, **item._modules}
        fields = {k: v for k, v in fields.items() if k not in MODULE_ATTRIBUTES} | held
    return {name: fields[name] for name in sorted(fields.keys() - _NOT_READ)}


def _instructions(code: types.CodeType) -> tuple[object, ...]:
    constants = [_constant(item) for item in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def _constant(item: object) -> object:
    """The same text in each process: that of a set depends on the hashes of its items."""
    if isinstance(item, types.CodeType):
        return _instructions(item)
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names and texts in code, and in the functions inside it."""
    return frozenset(code.co_names).union(*map(_names_of_constant, code.co_consts))


def _names_of_constant(item: object) -> frozenset[str]:
    if isinstance(item, str):
        return frozenset({item})
    if isinstance(item, types.CodeType):
        return _names_in(item)
    if isinstance(item, tuple | frozenset):
        return frozenset().union(*map(_names_of_constant, item))
    return frozenset()


def _imported(name: str, package: str) -> Iterator[str]:
    """The imported modules of a library that a statement in this package can mean by a name."""
    parts = package.split(".")
    for i in range(len(parts) + 1):
        module = ".".join([*parts[:i], name])
        if in_library(module) and module in sys.modules:
            yield module


@functools.cache
def _installed() -> tuple[str, ...]:
    """The name and version of each installed package: a library's code asks which are there."""
    folders = [Path(folder) for folder in sys.path if folder and Path(folder).is_dir()]
    ends = (".dist-info", ".egg-info", ".egg-link")
    return tuple(
        sorted(path.name for folder in folders for path in folder.iterdir() if path.suffix in ends)
    )


def class_name(kind: type) -> str:
    """The module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
