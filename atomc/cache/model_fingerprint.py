"""A model in words: what tells one that computes something else, or on other tensors, from it (cache.model_cache)."""

import contextlib
import enum
import operator
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atomc.cache.artifact import Unstorable
from atomc.cache.fingerprint import (
    PACKAGE,
    PLAIN_TENSORS,
    Parts,
    digest,
    digest_of_values,
    given,
    lies,
    sources_in,
    surroundings,
)
from atomc.options import Options
from atomc.platform import Platform
from atomc.torch_compat.names import changed_settings, hooks_of, hooks_on_all_modules, modes_are_on

_PACKAGE, _TORCH = str(PACKAGE), str(Path(torch.__file__).parent)
_STANDARD = sysconfig.get_paths()["stdlib"]
# Where the code of models lies; what other modules of the package hold may change while they work.
_CODE = ("atomc.models", "atomc.quantization", "atomc.ops")
# What every module has; the rest is what its class made of it.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_SETTINGS = ("torch._dynamo.config", "torch._functorch.config", "torch.fx.experimental._config")
_SPELLED = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
            torch.Size)  # fmt: skip
# What a call of a module of torch runs; Dynamo itself replaces others, such as __init__.
_OF_A_CALL = frozenset({"forward", "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__",
                        "__iter__", "__len__", "__getitem__"})  # fmt: skip
# Callables of these kinds are known by their kind and name: ops, builtins, types.
_NAMED = ("atomc.", "torch.", "typing.", "types.", "collections.abc.", "builtins.")
# A constant of a model is small; what is larger is a weight, and belongs into a buffer.
_MOST_BYTES = 2**20


def described(model: nn.Module, options: Options, platform: Platform) -> Parts:
    """The parts by which the cache knows a model. Raises Unstorable for one that has to be traced, with the reason."""
    if modes_are_on():
        raise Unstorable("a mode of torch is on, such as a default device")
    if hooks_on_all_modules():
        raise Unstorable("there is a hook on all modules")
    tree = _Tree(model)
    parts = {"kind of program": "runtime, by its modules", **surroundings(options, platform), **sources_in("models")}
    parts |= {f"setting of {name}": ", ".join(changed_settings(name)) for name in _SETTINGS}
    parts |= {f"module {path or '(root)'}": tree.module(path, module) for path, module in model.named_modules()}
    parts |= tree.code()
    parts["model"] = f"{_name(type(model))} of {len(tree.paths)} modules"
    return parts


def tensors_of(model: nn.Module) -> list[tuple[Tensor, str]]:
    """The parameters and buffers, each with its path; one that several modules share with all its paths."""
    return [(tensor, f"{path}.{name}".removeprefix(".")) for path, module in model.named_modules()
            for name, tensor in (*module._parameters.items(), *module._buffers.items()) if tensor is not None]  # fmt: skip


class _Tree:
    """The modules of one model, and the classes and functions that were met while describing them."""

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.tensors: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        for tensor, path in tensors_of(model):
            if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided:
                raise Unstorable(f"{path} is a {type(tensor).__name__} with layout {tensor.layout}")
            self.tensors.setdefault(id(tensor), path)
            if tensor.nbytes:
                self.memory.setdefault(tensor.untyped_storage().data_ptr(), path)
        self.classes: dict[type, None] = {}
        self._within: list[int] = []

    def module(self, path: str, module: nn.Module) -> str:
        """One module: its class, what it is set to, its tensors, the names of its children."""
        where, within = path or "the model", f"{path}." if path else ""
        if hook := hooks_of(module):
            raise Unstorable(f"{where} has a hook ({hook})")
        self.classes[type(module)] = None
        if not _of_ours(type(module)) and not type(module).__module__.startswith("torch.nn."):
            raise Unstorable(f"{where} is a {_name(type(module))}, whose code may be anything")
        words = [_name(type(module))]
        words += [f"{name}={self.value(value, within + name)}" for name, value in sorted(vars(module).items())
                  if name not in _OF_EVERY_MODULE]  # fmt: skip
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            words.append(f"{name}: {'none' if tensor is None else self.tensor(tensor, within + name)}")
        for name, child in module._modules.items():
            at = "" if child is None else self.paths[id(child)]
            words.append(f"child {name}" + ("" if at == within + name else f" is {at or 'none'}"))
        return ", ".join(words)

    def tensor(self, tensor: Tensor, path: str) -> str:
        """A parameter or buffer: what it is, how it lies, and with which others it shares itself or its memory."""
        first = self.tensors[id(tensor)]
        memory = self.memory.get(tensor.untyped_storage().data_ptr(), path)
        words = [given(tensor), lies(tensor)]
        words += [f"is {first}"] * (first != path) + [f"in the memory of {memory}"] * (memory != path)
        words += [f"from {tensor.storage_offset()}"] * bool(tensor.storage_offset())
        return " ".join([*words, *["with gradient"] * tensor.requires_grad])

    def value(self, value: Any, where: str) -> str:
        """What an attribute is, equal for equal ones of two processes."""
        kind = type(value)
        if kind in _SPELLED:
            return repr(value)
        if id(value) in self._within:
            raise Unstorable(f"{where} contains itself")
        self._within.append(id(value))
        try:
            return self._compound(value, kind, where)
        finally:
            self._within.pop()

    def _compound(self, value: Any, kind: type, where: str) -> str:
        def all_of(items: Any) -> str:
            return ", ".join(self.value(item, where) for item in items)

        if kind in (list, tuple):
            return f"{kind.__name__}({all_of(value)})"
        if kind in (set, frozenset):
            return f"{kind.__name__}({', '.join(sorted(self.value(item, where) for item in value))})"
        if kind is dict:
            return "{" + ", ".join(f"{self.value(k, where)}: {self.value(v, where)}" for k, v in value.items()) + "}"
        if isinstance(value, nn.Module):
            if id(value) not in self.paths:
                raise Unstorable(f"{where} is a module outside of the model")
            return f"module {self.paths[id(value)]}"
        if kind in PLAIN_TENSORS:
            if value.nbytes > _MOST_BYTES:
                raise Unstorable(f"{where} is a large tensor, and no parameter or buffer")
            return f"{lies(value)} {digest_of_values(value)}"
        if kind is types.FunctionType:
            return self._function(value, where)
        if isinstance(value, type):
            return f"class {_name(value)}"
        if not _of_ours(kind):
            raise Unstorable(f"{where} is a {_name(kind)}, which cannot be compared between processes")
        self.classes[kind] = None
        if isinstance(value, enum.Enum):
            return f"{_name(kind)}.{value.name}"
        if isinstance(value, tuple):
            return f"{_name(kind)}({all_of(value)})"
        if not hasattr(value, "__dict__"):
            raise Unstorable(f"{where} is a {_name(kind)}, which has no attributes to compare")
        return f"{_name(kind)}({', '.join(f'{k}={self.value(v, where)}' for k, v in sorted(vars(value).items()))})"

    def _function(self, function: types.FunctionType, where: str) -> str:
        """A function by its name, which must lead to it: what it computes is in the source, a part of its own.

        One that wraps another has the name of that, and does what its decorator was told.
        """
        file = function.__code__.co_filename
        ours = file.startswith((_PACKAGE, _TORCH, _STANDARD, "<frozen "))
        if not ours or not _in_its_place(function) or hasattr(function, "__wrapped__"):
            raise Unstorable(f"{where} is {function.__qualname__} of {file}, which is no code of atomc's")
        return f"{function.__module__}.{function.__name__}"

    def code(self) -> Parts:
        """The classes, and the modules of the package that these are written with: nothing in them may be replaced."""
        bases = dict.fromkeys(base for kind in self.classes for base in kind.__mro__ if base is not object)
        for base in bases:
            if not _of_ours(base) and not base.__module__.startswith(("torch.nn.", "typing", "abc", "enum", "builtins")):
                raise Unstorable(f"{_name(base)} is no class of atomc's or torch's")
        parts = {f"class {_name(base)}": digest(self._class(base)) for base in bases}
        waiting = [base.__module__ for base in bases if _of_ours(base)] + ["torch.nn.functional"]
        while waiting:
            name = waiting.pop()
            if f"names in {name}" not in parts:
                parts[f"names in {name}"], others = self._namespace(name)
                waiting += others
        for base in filter(_of_ours, bases):
            parts |= sources_in(str(Path(sys.modules[base.__module__].__file__ or "").relative_to(PACKAGE)))
        return parts

    def _class(self, kind: type) -> str:
        """What a class consists of."""
        if not _in_its_place(kind):
            raise Unstorable(f"{_name(kind)} is not the class of that name")
        lines = []
        for name, item in sorted(vars(kind).items()):
            if not _of_ours(kind) and name not in _OF_A_CALL:
                continue
            where = f"{_name(kind)}.{name}"
            functions = _functions_in(item)
            for function in functions:
                file = function.__code__.co_filename
                if file == "<string>" or file.startswith(_STANDARD):
                    lines.append(f"{name}: made")  # by dataclass
                elif not _of_ours(kind):
                    lines.append(f"{name}: {self._function(function, where)}")
                elif file == sys.modules[kind.__module__].__file__:
                    lines.append(f"{name}: {function.__qualname__}")
                else:
                    raise Unstorable(f"{where} was replaced by {function.__qualname__} of {file}")
            if not functions and (name in _OF_A_CALL or not name.startswith("__")):
                lines.append(f"{name}={self._constant(item, where)}")
        return "\n".join(lines)

    def _namespace(self, name: str) -> tuple[str, list[str]]:
        """A digest of what the names in a module stand for, and the modules of models' code that they lead to."""
        lines, others = [], []
        for key, item in sorted(vars(sys.modules[name]).items()):
            if key.startswith("__"):
                continue
            if isinstance(item, types.FunctionType):
                lines.append(f"{key}: {self._function(item, f'{name}.{key}')}")
            else:
                lines.append(f"{key}: {self._constant(item, f'{name}.{key}')}")
            home = item.__name__ if isinstance(item, types.ModuleType) else getattr(item, "__module__", None) or ""
            if isinstance(home, str) and home.startswith(_CODE) and home in sys.modules:
                others.append(home)
        return digest("\n".join(lines)), others

    def _constant(self, item: Any, where: str) -> str:
        """A constant beside code; of one that no text stands for, the kind and name: its source is a part of its own."""
        try:
            return self.value(item, where)
        except Unstorable:
            kind = _name(type(item))
            if callable(item) and not kind.startswith(_NAMED) and not _in_its_place(item):
                raise Unstorable(f"{where} is a {kind}, which is no code of atomc's") from None
            return f"{kind} {getattr(item, '__name__', '')}"


def _functions_in(item: Any) -> list[types.FunctionType]:
    """The functions that an attribute of a class is made of."""
    parts = [item.__func__] if isinstance(item, staticmethod | classmethod) else [item]
    parts = [item.fget, item.fset, item.fdel] if isinstance(item, property) else parts
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _in_its_place(item: Any) -> bool:
    """Whether its own name leads to it, as of nothing that was made while running."""
    with contextlib.suppress(AttributeError):
        found = sys.modules.get(item.__module__)
        return getattr(found, item.__name__, None) is item or operator.attrgetter(item.__qualname__)(found) is item
    return False


def _of_ours(kind: type) -> bool:
    return kind.__module__.startswith("atomc.")


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
