"""The cache key of a model that is not traced: a description of its modules, equal for models that
compute the same.
"""

import contextlib
import enum
import functools
import operator
import sys
import sysconfig
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomc.cache.artifact import Uncacheable
from atomc.cache.fingerprint import (
    MODEL_CODE,
    PACKAGE,
    PLAIN_TENSORS,
    Parts,
    digest,
    digest_of_values,
    environment_parts,
    input_kind,
    sources_in,
    tensor_layout,
)
from atomc.cache.library_code import (
    MODULE_ATTRIBUTES,
    PLAIN_TYPES,
    LibraryCode,
    class_name,
    functions_in,
    in_library,
    is_library_file,
)
from atomc.ops.inputs import ModelInputs
from atomc.options import Options
from atomc.platform import Platform
from atomc.torch_compat.core import (
    changed_settings,
    hooks_of,
    hooks_on_all_modules,
    torch_modes_active,
)

_PACKAGE, _TORCH = str(PACKAGE), str(Path(torch.__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
# The code of what contextlib.contextmanager returns, the same for all functions.
_CONTEXT_MANAGER = contextlib.contextmanager(lambda: iter(())).__code__
# Modules with the code of models; the globals of other modules of the package may change at run
# time.
_MODEL_CODE = ("atomc.models", "atomc.parallel", "atomc.quantization", "atomc.ops")
# How transformers has read the weights of a model.
_LOADING = frozenset({"_weight_conversions"})
_SETTINGS = ("torch._dynamo.config", "torch._functorch.config", "torch.fx.experimental._config")
# Methods that a call of a torch module runs. Others are not compared: Dynamo replaces some, such as
# __init__.
_CALL_METHODS = frozenset(
    {
        "forward",
        "__call__",
        "_wrapped_call_impl",
        "_call_impl",
        "__getattr__",
        "__getattribute__",
        "__iter__",
        "__len__",
        "__getitem__",
    }
)
# Callables of these kinds (ops, builtins, types) are identified by kind and name.
_KNOWN_BY_NAME = ("atomc.", "torch.", "typing.", "types.", "collections.abc.", "builtins.")
# A larger tensor is a weight, which must be a parameter or a buffer.
_MAX_CONSTANT_BYTES = 2**20


def model_parts(
    model: nn.Module, options: Options, platform: Platform, takes: ModelInputs | str, owned: bool
) -> Parts:
    """The parts of a model's cache key. Raises Uncacheable for a model that must be traced, with
    the reason.

    takes   as in atomc.cache.model_cache.ModelCache
    """
    if torch_modes_active():
        raise Uncacheable("a torch function or dispatch mode is active, such as a default device")
    if hooks_on_all_modules():
        raise Uncacheable("a global module hook is registered")
    tree = _ModelDescriber(model)
    parts = {
        "kind of program": f"runtime, by its modules{', weights owned' * owned}",
        "inputs": str(takes),
        **environment_parts(options, platform),
        **sources_in(*MODEL_CODE),
    }
    parts |= {f"setting of {name}": ", ".join(changed_settings(name)) for name in _SETTINGS}
    parts |= {
        f"module {path or '(root)'}": tree.module(path, module)
        for path, module in model.named_modules()
    }
    parts |= tree.code()
    parts["model"] = f"{class_name(type(model))} of {len(tree.paths)} modules"
    return parts


def named_tensors(model: nn.Module) -> list[tuple[Tensor, str]]:
    """(tensor, path) for each parameter and buffer; a shared one appears once for each of its
    paths.
    """
    return [
        (tensor, f"{path}.{name}".removeprefix("."))
        for path, module in model.named_modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]


class _ModelDescriber:
    """Describes the modules of one model, and collects their classes and functions."""

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.tensors: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        for tensor, path in named_tensors(model):
            if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided:
                raise Uncacheable(
                    f"{path} is a {type(tensor).__name__} with layout {tensor.layout}"
                )
            self.tensors.setdefault(id(tensor), path)
            if tensor.untyped_storage().nbytes():
                self.memory.setdefault(tensor.untyped_storage().data_ptr(), path)
        self.classes: dict[type, None] = {}
        self.library = LibraryCode(self._function)
        self._told: dict[int, str] = {}  # objects of a library, such as the config of all modules
        self._within: list[int] = []

    def module(self, path: str, module: nn.Module) -> str:
        """One module: its class, attributes, tensors, and the names of its children."""
        where, within = path or "the model", f"{path}." if path else ""
        hooks = hooks_of(module)
        _check_known(where, type(module), hooks)
        self.classes[type(module)] = None
        words = [class_name(type(module))]
        words += [
            f"{name}={self.value(value, within + name)}"
            for name, value in sorted(vars(module).items())
            if name not in MODULE_ATTRIBUTES | _LOADING
        ]
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            words.append(
                f"{name}: {'none' if tensor is None else self.tensor(tensor, within + name)}"
            )
        words += [f"{kind}: {self.value(hook, f'{where}.{kind}')}" for kind, hook in hooks]
        for name, child in module._modules.items():
            at = "" if child is None else self.paths[id(child)]
            words.append(f"child {name}" + ("" if at == within + name else f" is {at or 'none'}"))
        return ", ".join(words)

    def tensor(self, tensor: Tensor, path: str) -> str:
        """A parameter or buffer: its kind and layout, and the tensors that it is or shares memory
        with.
        """
        first = self.tensors[id(tensor)]
        memory = self.memory.get(tensor.untyped_storage().data_ptr(), path)
        words = [input_kind(tensor), tensor_layout(tensor)]
        words += [f"is {first}"] * (first != path) + [f"in the memory of {memory}"] * (
            memory != path
        )
        words += [f"from {tensor.storage_offset()}"] * bool(tensor.storage_offset())
        return " ".join([*words, *["with gradient"] * tensor.requires_grad])

    def value(self, value: Any, where: str) -> str:
        """The text of an attribute's value, equal for equal values in two processes."""
        kind = type(value)
        if kind in PLAIN_TYPES:
            return repr(value)
        if id(value) in self._within:
            raise Uncacheable(f"{where} contains itself")
        self._within.append(id(value))
        try:
            return self._compound(value, kind, where)
        finally:
            self._within.pop()

    def _compound(self, value: Any, kind: type, where: str) -> str:
        if kind in (list, tuple):
            return f"{kind.__name__}({self._items(value, where)})"
        if kind in (set, frozenset):
            return (
                f"{kind.__name__}({', '.join(sorted(self.value(item, where) for item in value))})"
            )
        if kind is dict:
            return (
                "{"
                + ", ".join(
                    f"{self.value(k, where)}: {self.value(v, where)}" for k, v in value.items()
                )
                + "}"
            )
        if isinstance(value, nn.Module):
            if id(value) not in self.paths:
                raise Uncacheable(f"{where} is a module outside of the model")
            return f"module {self.paths[id(value)]}"
        if kind in PLAIN_TENSORS:
            if value.nbytes > _MAX_CONSTANT_BYTES:
                raise Uncacheable(f"{where} is a large tensor, and no parameter or buffer")
            return f"{tensor_layout(value)} {digest_of_values(value)}"
        if kind is types.FunctionType:
            return self._function(value, where)
        if isinstance(value, type):
            return f"class {class_name(value)}"
        return self._object(value, kind, where)

    def _object(self, value: Any, kind: type, where: str) -> str:
        """A method, a partial, or an object of a class of atomc or a library, by its attributes."""
        if kind is types.MethodType:
            return f"method({self._items((value.__func__, value.__self__), where)})"
        if kind is functools.partial:
            return f"partial({self._items((value.func, value.args, value.keywords), where)})"
        if kind is types.BuiltinFunctionType and _found_by_name(value):
            return f"builtin {value.__module__}.{value.__qualname__}"
        if in_library(kind.__module__):
            first = self._told.setdefault(id(value), where)
            return self.library.text(value, where) if first == where else f"is {first}"
        if not _is_ours(kind):
            raise Uncacheable(
                f"{where} is a {class_name(kind)}, which cannot be compared between processes"
            )
        self.classes[kind] = None
        if isinstance(value, enum.Enum):
            return f"{class_name(kind)}.{value.name}"
        if isinstance(value, tuple):
            return f"{class_name(kind)}({self._items(value, where)})"
        if not hasattr(value, "__dict__"):
            raise Uncacheable(
                f"{where} is a {class_name(kind)}, which has no attributes to compare"
            )
        fields = [f"{k}={self.value(v, where)}" for k, v in sorted(vars(value).items())]
        return f"{class_name(kind)}({', '.join(fields)})"

    def _items(self, items: Iterable[Any], where: str) -> str:
        return ", ".join(self.value(item, where) for item in items)

    def _function(self, function: types.FunctionType, where: str) -> str:
        """A function's qualified name, which must resolve to it; its source file is a separate part
        of the key.

        A function that wraps another is refused, unless it is the context manager made from a
        function of ours: it has the name of the wrapped one, but depends on its decorator.
        """
        file = function.__code__.co_filename
        if is_library_file(file):
            return self.library.function(function, where)
        ours = file.startswith((_PACKAGE, _TORCH, _STDLIB, "<frozen "))
        wraps = hasattr(function, "__wrapped__") and not _is_context_manager_of_ours(function)
        if not ours or not _found_by_name(function) or wraps:
            raise Uncacheable(
                f"{where} is {function.__qualname__} of {file}, which is not code of atomc"
            )
        return f"{function.__module__}.{function.__name__}"

    def code(self) -> Parts:
        """Parts for the classes and the modules that they use: a class or a global that was
        replaced changes the key.
        """
        bases = dict.fromkeys(
            base for kind in self.classes for base in kind.__mro__ if base is not object
        )
        for base in list(bases):
            if in_library(base.__module__):
                self.library.add_class(base)
                del bases[base]
            elif not _is_ours(base) and not base.__module__.startswith(
                ("torch.nn.", "typing", "abc", "enum", "builtins")
            ):
                raise Uncacheable(f"{class_name(base)} is not a class of atomc or torch")
        parts = {f"class {class_name(base)}": digest(self._class(base)) for base in bases}
        waiting = [base.__module__ for base in bases if _is_ours(base)] + ["torch.nn.functional"]
        while waiting:
            name = waiting.pop()
            if f"names in {name}" not in parts:
                parts[f"names in {name}"], others = self._namespace(name)
                waiting += others
        for base in filter(_is_ours, bases):
            parts |= sources_in(
                str(Path(sys.modules[base.__module__].__file__ or "").relative_to(PACKAGE))
            )
        return parts | self.library.parts()

    def _class(self, kind: type) -> str:
        """The functions and constants of a class."""
        if not _found_by_name(kind):
            raise Uncacheable(f"{class_name(kind)} names another class")
        lines = []
        for name, item in sorted(vars(kind).items()):
            if not _is_ours(kind) and name not in _CALL_METHODS:
                continue
            where = f"{class_name(kind)}.{name}"
            functions = functions_in(item)
            for function in functions:
                file = function.__code__.co_filename
                if file == "<string>" or file.startswith(_STDLIB):
                    lines.append(f"{name}: made")  # generated by dataclass
                elif not _is_ours(kind):
                    lines.append(f"{name}: {self._function(function, where)}")
                elif file == sys.modules[kind.__module__].__file__:
                    lines.append(f"{name}: {function.__qualname__}")
                else:
                    raise Uncacheable(f"{where} was replaced by {function.__qualname__} of {file}")
            if not functions and (name in _CALL_METHODS or not name.startswith("__")):
                lines.append(f"{name}={self._constant(item, where)}")
        return "\n".join(lines)

    def _namespace(self, name: str) -> tuple[str, list[str]]:
        """(digest of the globals of a module, the modules with code of models that they come
        from).
        """
        lines, others = [], []
        for key, item in sorted(vars(sys.modules[name]).items()):
            if key.startswith("__"):
                continue
            if isinstance(item, types.FunctionType):
                lines.append(f"{key}: {self._function(item, f'{name}.{key}')}")
            else:
                lines.append(f"{key}: {self._constant(item, f'{name}.{key}')}")
            home = (
                item.__name__
                if isinstance(item, types.ModuleType)
                else getattr(item, "__module__", None) or ""
            )
            if isinstance(home, str) and home.startswith(_MODEL_CODE) and home in sys.modules:
                others.append(home)
        return digest("\n".join(lines)), others

    def _constant(self, item: Any, where: str) -> str:
        """The text of a constant; without a stable repr, its type and name: its source is a
        separate part of the key.
        """
        try:
            return self.value(item, where)
        except Uncacheable:
            kind = class_name(type(item))
            if callable(item) and not kind.startswith(_KNOWN_BY_NAME) and not _found_by_name(item):
                raise Uncacheable(f"{where} is a {kind}, which is not code of atomc") from None
            return f"{kind} {getattr(item, '__name__', '')}"


def _is_context_manager_of_ours(function: types.FunctionType) -> bool:
    """Whether contextlib.contextmanager made it from a function of this package."""
    wrapped = getattr(function, "__wrapped__", None)
    return (
        function.__code__ is _CONTEXT_MANAGER
        and isinstance(wrapped, types.FunctionType)
        and wrapped.__code__.co_filename.startswith(_PACKAGE)
    )


def _found_by_name(item: Any) -> bool:
    """Whether its module and qualified name resolve to it; False for an object created at run
    time.
    """
    with contextlib.suppress(AttributeError):
        module = sys.modules.get(item.__module__)
        return (
            getattr(module, item.__name__, None) is item
            or operator.attrgetter(item.__qualname__)(module) is item
        )
    return False


def _check_known(where: str, kind: type, hooks: Sequence[tuple[str, object]]) -> None:
    """Raise Uncacheable for a module whose class or hooks have code that is not in the key."""
    for name, hook in hooks:
        if not _is_ours(type(hook)):
            raise Uncacheable(f"{where} has a hook ({name})")
    is_library_code = (
        _is_ours(kind) or in_library(kind.__module__) or kind.__module__.startswith("torch.nn.")
    )
    if not is_library_code:
        raise Uncacheable(
            f"{where} is a {class_name(kind)}, a class outside atomc, transformers and torch.nn"
        )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("atomc.")
