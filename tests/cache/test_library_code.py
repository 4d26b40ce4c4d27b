"""Which code of a library a model's cache key contains: what a forward can reach, by its names."""

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from atomc.cache import library_code
from atomc.cache.artifact import Uncacheable
from atomc.cache.library_code import LibraryCode
from atomc.cache.store import differences

FILES = {
    "__init__": "",
    "tools": """
from . import numbers
def size(x):
    return x + numbers.one
def other_size(x):
    return x - numbers.one
""",
    "numbers": "one = 1\ntwo = 2\n",
    "late": "def late(x):\n    return x\ndef later(x):\n    return -x\n",
    "config": """
import dataclasses
@dataclasses.dataclass
class Config:
    width: int = 8
class Registry(dict):
    held = {}
    def __getitem__(self, name):
        return self.held[name]
""",
    "layers": """
import functools
from torch import nn
from . import tools
from .config import Config, Registry
SCALE, UNUSED = 2.0, 1
KINDS = Registry()
def doubled(times):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) * times
        return wrapper
    return decorate
@functools.lru_cache
def cached(x):
    return tools.size(x)
class Base(nn.Module):
    FACTOR, OFFSET, NEVER = 3, 1, 4
    @property
    def half(self):
        return 0.5
    @staticmethod
    def chosen(x):
        return x
    def never(self):
        return UNUSED
class Layer(Base):
    @doubled(2)
    def forward(self, x):
        from .late import late
        def inner(y):
            return y * SCALE
        x = late(inner(x)) * getattr(self, "FACTOR") * self.half
        for name in ("OFFSET", "SHIFT"):
            x = x + getattr(self, name, 0)
        return KINDS["sum"](cached(self.chosen(x))) * Config().width
""",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A library of some modules, imported."""
    folder = tmp_path / "some_library"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library_code, "LIBRARIES", ("some_library",))
    for name in FILES:
        importlib.import_module(f"some_library.{name}".removesuffix(".__init__"))
    yield sys.modules["some_library"]
    for name in [name for name in sys.modules if name.startswith("some_library")]:
        del sys.modules[name]


def refused(function: Callable[..., Any], where: str) -> str:
    raise Uncacheable(f"{where} is {function.__qualname__}")


def parts(library: ModuleType) -> dict[str, str]:
    code = LibraryCode(refused)
    code.add_class(library.layers.Layer)
    return code.parts()


def another_global(library: ModuleType) -> str:
    library.layers.SCALE = 3.0
    return "layers"


def an_attribute_that_getattr_names(library: ModuleType) -> str:
    library.layers.Base.FACTOR = 5
    return "layers"


def an_attribute_that_getattr_names_from_a_list(library: ModuleType) -> str:
    library.layers.Base.OFFSET = 5
    return "layers"


def a_function_in_the_place_of_another(library: ModuleType) -> str:
    library.tools.size = library.tools.other_size
    return "tools"


def a_number_of_a_module(library: ModuleType) -> str:
    library.numbers.one = 7
    return "numbers"


def what_a_function_imports_when_it_runs(library: ModuleType) -> str:
    library.late.late = library.late.later
    return "late"


def a_static_method(library: ModuleType) -> str:
    library.layers.Base.chosen = staticmethod(library.tools.size)
    return "layers"


def a_property(library: ModuleType) -> str:
    library.layers.Base.half = property(library.tools.size)
    return "layers"


def what_a_decorator_closes_over(library: ModuleType) -> str:
    layer = library.layers.Layer
    layer.forward = library.layers.doubled(3)(layer.forward.__wrapped__)
    return "layers"


def what_a_registry_holds(library: ModuleType) -> str:
    library.config.Registry.held["sum"] = library.tools.size
    return "config"


def the_default_of_a_dataclass(library: ModuleType) -> str:
    library.config.Config.width = 9
    return "config"


def a_method_made_from_a_text(library: ModuleType) -> str:
    made: dict[str, Any] = {}
    exec("def chosen(x):\n    return x + 2\n", vars(library.layers), made)
    library.layers.Base.chosen = staticmethod(made["chosen"])
    return "layers"


@pytest.mark.parametrize(
    "change",
    [
        another_global,
        an_attribute_that_getattr_names,
        an_attribute_that_getattr_names_from_a_list,
        a_function_in_the_place_of_another,
        a_number_of_a_module,
        what_a_function_imports_when_it_runs,
        a_static_method,
        a_property,
        what_a_decorator_closes_over,
        what_a_registry_holds,
        the_default_of_a_dataclass,
        a_method_made_from_a_text,
    ],
    ids=lambda change: change.__name__,
)
def test_a_change_that_a_forward_can_reach_is_seen(
    library: ModuleType, change: Callable[[ModuleType], str]
) -> None:
    before = parts(library)
    assert before == parts(library)
    module = change(library)
    said = [line.split(" changed")[0] for line in differences(before, parts(library))]
    assert f"names in some_library.{module}" in said


def parts_with(library: ModuleType, result: str) -> dict[str, str]:
    """With a method made from a text."""
    functions: dict[str, Any] = {}
    exec(f"def chosen(x):\n    return {result}\n", vars(library.layers), functions)
    library.layers.Base.chosen = staticmethod(functions["chosen"])
    return parts(library)


def test_two_functions_made_from_texts_differ_by_what_they_do(library: ModuleType) -> None:
    keys = [parts_with(library, f"x + {number}") for number in (2, 3, 2)]
    assert keys[0] == keys[2] != keys[1]


def test_the_order_of_a_set_in_a_function_made_from_a_text_is_none(library: ModuleType) -> None:
    """Each process has an order of its own for texts; these numbers have one in each way of writing
    them.
    """
    assert list({8, 16}) != list({16, 8})
    keys = [parts_with(library, f"x in {{{items}}}") for items in ("8, 16", "16, 8", "8, 17")]
    assert keys[0] == keys[1] != keys[2]


def test_what_no_forward_names_is_not_read(library: ModuleType) -> None:
    before = parts(library)
    library.layers.Base.NEVER, library.numbers.two = 9, 9
    library.layers.Base.never = lambda self: 9
    assert parts(library) == before


def test_the_key_has_the_files_of_reached_modules_and_the_installed_packages(
    library: ModuleType,
) -> None:
    before = parts(library)
    named = {name.removeprefix("source of some_library.") for name in before if "source" in name}
    assert named == {"layers", "tools", "numbers", "late", "config"}
    assert {"version of some_library", "installed packages"} <= before.keys()
    file = Path(library.tools.__file__ or "")
    file.write_text(f"{file.read_text()}\n# another line\n")
    (said,) = differences(before, parts(library))
    assert said.startswith("source of some_library.tools changed")


def test_a_function_from_elsewhere_is_refused(library: ModuleType) -> None:
    library.layers.cached = lambda x: x
    with pytest.raises(Uncacheable, match=r"some_library\.layers\.cached is .*<lambda>"):
        parts(library)


class Mine:
    pass


def test_an_object_of_a_class_from_elsewhere_is_refused(library: ModuleType) -> None:
    library.layers.SCALE = Mine()
    with pytest.raises(Uncacheable, match=r"layers\.SCALE is a test_library_code\.Mine, which "):
        parts(library)


def test_what_contains_itself_and_objects_of_other_packages_have_a_text(
    library: ModuleType,
) -> None:
    itself: list[Any] = [1]
    itself.append(itself)
    library.layers.SCALE = itself
    library.numbers.one = (
        threading.Lock(),
        functools.partial(library.tools.size, 1),
        nn.LeakyReLU(0.1),
    )
    before = parts(library)
    for argument, slope in ((2, 0.1), (1, 0.2)):
        changed = functools.partial(library.tools.size, argument), nn.LeakyReLU(slope)
        library.numbers.one = (threading.Lock(), *changed)
        (said,) = differences(before, parts(library))
        assert said.startswith("names in some_library.numbers changed")
