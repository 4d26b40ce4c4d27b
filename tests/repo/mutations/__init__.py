"""One-line bugs, each of which must turn a test red: `make test-mutations`.

A module of this package has a list BUGS. run.py applies one bug after the other to a copy of the
tree, and runs the tests that are to notice it.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Bug:
    """In `file`, `old`, which is there once, becomes `new`, which may be empty; `tests` are arguments
    of pytest.
    """

    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        """The file and its new text, in one line."""
        old, new = " ".join(self.old.split()), " ".join(self.new.split())
        return f"{self.file}: {new or f'without {old}'}"


def all_bugs() -> list[Bug]:
    """The bugs of all modules, in the order of their names."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if found.name != "run")
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [bug for module in modules for bug in module.BUGS]
