"""Bugs that must turn a test red: `make test-mutations`.

By hand, each of them proof that a test looks: the modules with a list BUGS, for the kernels over
AITER and for the scheduler. All others are generated (generate.py) from the functions that
targets.py names. run.py applies one after the other to a copy of the tree.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
OTHERS = {"generate", "refusals", "run", "run_refusals", "targets"}


@dataclass(frozen=True)
class Bug:
    """In `file`, `old`, which is there once, becomes `new`, which may be empty; `tests` are arguments
    of pytest.
    """

    file: str
    old: str
    new: str
    tests: str

    def applied_to(self, text: str) -> str:
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        """The file and its new text, in one line."""
        old, new = " ".join(self.old.split()), " ".join(self.new.split())
        return f"{self.file}: {new or f'without {old}'}"


def all_bugs() -> list[Bug]:
    """The bugs by hand of all modules, in the order of their names."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - OTHERS)
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [bug for module in modules for bug in module.BUGS]
